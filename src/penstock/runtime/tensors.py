"""Which tensors of a module are its weights. Trainer and engines must agree on it, or no digest ever matches."""

from __future__ import annotations

from torch import Tensor, nn


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once. Live, not copied."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
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
    """Tensors by name whose memory is the receiver's: nobody else will write to it, so it need not be copied."""
