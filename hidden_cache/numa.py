"""Which NUMA node the pool should be on: the one that the GPU hangs from."""

from __future__ import annotations

from pathlib import Path

import torch

_SYSFS = Path("/sys")


def node_for(setting: str | int, device: torch.device) -> tuple[int | None, str]:
    """The node that `hscache_numa` asks for, with rows on `device`.

    Returns:
        The node, and why there is none where one was asked for: not a failure, since memory of
        another node is only slower.
    """
    if isinstance(setting, int):
        return setting, ""
    if setting == "off":
        return None, ""
    if device.type != "cuda":
        return None, f"rows are on {device.type}: there is no GPU to be near to"
    return node_of_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def node_of_gpu(uuid: str, sysfs: Path = _SYSFS) -> tuple[int | None, str]:
    """The node of the GPU that NVML calls `uuid`, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "NVML cannot be asked for the GPU's place: pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
        try:
            address = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).busId
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"NVML does not say where {uuid} is: {error}"
    return _node_of_pci(address if isinstance(address, str) else address.decode(), sysfs)


def _node_of_pci(address: str, sysfs: Path) -> tuple[int | None, str]:
    """The node of a PCI device, by NVML's address, such as 00000000:3B:00.0."""
    domain, rest = address.split(":", 1)
    path = sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{rest.lower()}" / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError) as error:
        return None, f"the GPU's node cannot be read: {error}"
    if node < 0:
        return None, f"{path} is {node}: this machine has one node, or does not say the GPU's"
    return node, ""
