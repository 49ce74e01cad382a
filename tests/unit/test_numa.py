"""Where the pool's memory should be, with stand-ins for NVML and for a machine of two nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hidden_cache.numa import node_for, node_of_gpu

UUID = "GPU-12345678-1234-1234-1234-123456789012"


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """`pynvml` with one GPU, or with a driver that refuses."""

    NVMLError = NVMLError

    def __init__(self, bus_id: Any = "00000000:3B:00.0", refusal: str = "") -> None:
        super().__init__(bus_id=bus_id, refusal=refusal, open=0)

    def nvmlInit(self) -> None:
        if self.refusal:
            raise NVMLError(self.refusal)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:
        assert handle == UUID
        return SimpleNamespace(busId=self.bus_id)


def machine(folder: Path, address: str, node: str) -> Path:
    path = folder / "bus/pci/devices" / address / "numa_node"
    path.parent.mkdir(parents=True)
    path.write_text(node)
    return folder


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        (b"00000000:3B:00.0", "0000:3b:00.0"),
        ("00010000:C1:00.0", "10000:c1:00.0"),
    ],
)
def test_the_gpus_node_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bus_id: Any, address: str
) -> None:
    nvml = Nvml(bus_id)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert node_of_gpu(UUID, machine(tmp_path, address, "1\n")) == (1, "")
    assert nvml.open == 0


def test_a_machine_that_does_not_say_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    node, why = node_of_gpu(UUID, tmp_path)
    assert node is None
    assert "the GPU's node cannot be read" in why
    node, why = node_of_gpu(UUID, machine(tmp_path, "0000:3b:00.0", "-1\n"))
    assert node is None
    assert "numa_node is -1: this machine has one node" in why


def test_without_nvml_it_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert node_of_gpu(UUID) == (
        None,
        "NVML cannot be asked for the GPU's place: pip install nvidia-ml-py",
    )


@pytest.mark.parametrize(
    ("nvml", "uuid", "why"),
    [
        (Nvml(refusal="Driver Not Loaded"), UUID, "Driver Not Loaded"),
        (Nvml(), "GPU-x", "Not Found"),
    ],
)
def test_what_nvml_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, uuid: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert node_of_gpu(uuid) == (None, f"NVML does not say where {uuid} is: {why}")
    assert nvml.open == 0


def test_the_real_nvml_answers_or_says_why() -> None:
    node, why = node_of_gpu(UUID)
    assert node is None
    assert UUID in why or "pip install" in why


def test_the_setting_decides() -> None:
    host = torch.device("cpu")
    assert node_for("off", host) == (None, "")
    assert node_for(3, host) == (3, "")
    assert node_for("auto", host) == (None, "rows are on cpu: there is no GPU to be near to")


def test_auto_asks_for_the_gpu_that_the_rows_are_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(uuid=UUID.removeprefix("GPU-"))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(refusal="Driver Not Loaded"))
    device = torch.device("cuda", 1)
    assert node_for("auto", device) == (
        None,
        f"NVML does not say where {UUID} is: Driver Not Loaded",
    )
    assert asked == [device]
