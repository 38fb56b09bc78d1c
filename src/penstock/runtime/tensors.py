"""The weights of a module, the memory they use on a device, and the device of a process.

Trainer and engines must agree on the weights, or no digest matches; and on the memory, or one is held responsible for
the memory of the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.runtime.process import GPUS_VARIABLE

RESIDUE_BYTES = 64 << 20
"""Device memory that may stay allocated after an offload: caches of libraries that we cannot free."""


def device_bytes() -> int:
    """Device memory that torch has allocated in this process; 0 without a GPU."""
    return sum(torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count()))


def device_figures() -> dict[str, float]:
    """Peak device memory since the last call, and the GPU utilization from the driver; empty without a GPU."""
    if not torch.cuda.is_initialized():
        return {}
    figures = {"gpu_memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(ModuleNotFoundError, RuntimeError, ImportError):  # it needs the driver's Python package
        figures["gpu_busy_share"] = torch.cuda.utilization() / 100
    return figures


def free_device_caches() -> None:
    """Frees the caches of torch and cuBLAS. Nothing may be running on the devices."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # dozens of MiB for every thread that has used cuBLAS
        torch.cuda.empty_cache()


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once; only those of the adapter if there is one. Not copied."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if hasattr(module, "peft_config"):
        return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    buffers = list(module.named_buffers())
    if not buffers:
        return tensors
    pointers = {tensor.data_ptr() for tensor in tensors.values()}
    saved = module.state_dict()
    for name, buffer in buffers:
        if name in saved and buffer.data_ptr() not in pointers:
            tensors[name] = buffer.detach()
    return tensors


class OwnedTensors(dict[str, Tensor]):
    """Tensors by name whose memory the receiver owns: no other code writes to it, so no copy is needed."""


def device_of(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}") from error


def gpu_count() -> int:
    """GPUs of this machine, including those that this process cannot see."""
    return int(os.environ.get(GPUS_VARIABLE) or torch.cuda.device_count())


def device_at(name: str, devices: Sequence[int], *, in_pool: bool, rank: int = 0) -> torch.device:
    """The device of a rank: in a pool the GPU `devices[rank]`, otherwise the GPU `rank`, modulo the number of visible
    GPUs. A named device is used as it is; `auto` without a GPU is the CPU."""
    count = torch.cuda.device_count()
    if name not in ("auto", "cuda") or not count:
        return device_of(name)
    return torch.device("cuda", (devices[rank] if in_pool else rank) % count)
