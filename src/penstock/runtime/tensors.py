"""Which tensors of a module are its weights, and what of a device they occupy.

Trainer and engines must agree on the first, or no digest ever matches; and on the second, or one blames the other.
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
"""Device memory that may stay allocated when all else was taken off: caches of libraries, not ours to free."""


def device_bytes() -> int:
    """Device memory that this process has allocated, whatever for; 0 without a GPU."""
    return sum(torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count()))


def device_figures() -> dict[str, float]:
    """Peak of the memory since the last call, and how busy the GPU is as the driver counts; nothing without one."""
    if not torch.cuda.is_initialized():
        return {}
    figures = {"gpu_memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(ModuleNotFoundError, RuntimeError, ImportError):  # it needs the driver's Python package
        figures["gpu_busy_share"] = torch.cuda.utilization() / 100
    return figures


def free_device_caches() -> None:
    """Gives back what torch and its matrix library keep for later. Nothing may be running on the devices."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # dozens of MiB for every thread that ever multiplied
        torch.cuda.empty_cache()


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once; of a model with an adapter, the adapter's. Live."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if hasattr(module, "peft_config"):
        return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    buffers = list(module.named_buffers())
    if not buffers:
        return tensors
    known = {tensor.data_ptr() for tensor in tensors.values()}
    saved = module.state_dict()
    for name, buffer in buffers:
        if name in saved and buffer.data_ptr() not in known:
            tensors[name] = buffer.detach()
    return tensors


class OwnedTensors(dict[str, Tensor]):
    """Tensors by name whose memory is the receiver's: no other code writes to it, so it need not be copied."""


def device_of(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}") from error


def gpu_count() -> int:
    """Of this machine, also where this process may see only its own."""
    return int(os.environ.get(GPUS_VARIABLE) or torch.cuda.device_count())


def device_at(name: str, devices: Sequence[int], *, in_pool: bool, rank: int = 0) -> torch.device:
    """Where a process works that was given these devices. Unless a GPU is named, those of a pool are the GPUs in their
    order, as far as there are any; without a pool each rank takes one."""
    count = torch.cuda.device_count()
    if name not in ("auto", "cuda") or not count:
        return device_of(name)
    return torch.device("cuda", (devices[rank] if in_pool else rank) % count)
