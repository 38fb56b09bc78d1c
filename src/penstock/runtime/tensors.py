"""Which tensors of a module are its weights. Trainer and engines must agree on it, or no digest ever matches."""

from __future__ import annotations

from torch import Tensor, nn


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once. Live, not copied."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    known = {tensor.data_ptr() for tensor in tensors.values()}
    saved = module.state_dict()
    for name, buffer in module.named_buffers():
        if name in saved and buffer.data_ptr() not in known:
            tensors[name] = buffer.detach()
    return tensors
