"""A language model sharded over the ranks of a trainer with FSDP2, block by block.

Every rank keeps 1/N of every parameter, in float32 if it is trained. A block's parameters are gathered for its forward
and its backward pass and freed again. Gradients are summed, not averaged, because the loss is divided by the totals of
all ranks. A model in bfloat16 is gathered, computed and published in bfloat16; its float32 shards are the master
weights. With an adapter, the shards of the frozen base keep its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.engines.models import AdaptedPolicy, LanguagePolicy
from penstock.errors import ConfigError
from penstock.runtime.ranks import GroupStore, join_group
from penstock.runtime.tensors import module_tensors
from penstock.train.world import World
from penstock.weights.io.parts import own_rows


class ShardedPolicy(LanguagePolicy):
    """A language policy of which this rank holds a shard. `named_tensors` are distributed tensors."""

    def __init__(self, policy: LanguagePolicy, dtype: torch.dtype) -> None:
        super().__init__(policy.module, policy.tokenizer)
        self._whole = policy
        """The policy before sharding; only its tensors were replaced."""
        self.dtype = dtype
        """The dtype of computation and of published weights."""
        self._initialised = True

    def base(self) -> ShardedPolicy:
        """The model without its adapter, as `AdaptedPolicy.base`."""
        assert isinstance(self._whole, AdaptedPolicy)
        base = ShardedPolicy(self._whole.base(), self.dtype)
        base._initialised = False
        return base

    def evaluating(self) -> AbstractContextManager[None]:
        if not self._initialised:
            # FSDP2 records in its first pass which parameters are trained: the adapter must be enabled in it.
            with torch.no_grad():
                idle_pass(self.module)
            self._initialised = True
        return self._whole.evaluating()

    def prepare_training(self) -> None:
        self._whole.prepare_training()

    def save_config(self, directory: Path) -> None:
        self._whole.save_config(directory)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights in their published dtype: live tensors if the shards have that dtype, else copies."""
        return self._published(copy=False)

    def snapshot(self) -> dict[str, Tensor]:
        return self._published(copy=True)  # not a copy of a copy

    def _published(self, *, copy: bool) -> dict[str, Tensor]:
        return {
            name: tensor.to(self.dtype if isinstance(tensor, DTensor) else tensor.dtype, copy=copy)
            for name, tensor in self.named_shards().items()
        }

    def named_shards(self) -> dict[str, Tensor]:
        """The live tensors, of which this rank holds some rows."""
        return module_tensors(self.module)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Policy.load_tensors`."""
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        load_rows(self.named_shards().items(), lambda name, first, end: tensors[name][first:end])


def join_world(store: GroupStore, *, rank: int, ranks: int, device: torch.device, timeout_s: float) -> World:
    """Joins the process group; every rank calls it once. NCCL transfers GPU tensors, gloo host tensors."""
    if device.type == "cuda":
        torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())
        join_group(store, rank=rank, ranks=ranks, timeout_s=timeout_s, backend="cpu:gloo,cuda:nccl")
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return World(rank, ranks, group)
    join_group(store, rank=rank, ranks=ranks, timeout_s=timeout_s)
    return World(rank, ranks, dist.group.WORLD)


def shard(policy: LanguagePolicy, world: World, device: torch.device, *, masters: bool = True) -> ShardedPolicy:
    """Shards a policy over the ranks. The model stays in host memory; `device` is where it will compute.

    Without `masters` the shards keep the model's dtype, for a model that is not trained. The given policy must not be
    used afterwards.
    """
    module = policy.module
    dtype = next(module.parameters()).dtype
    full = {name: parameter.detach() for name, parameter in module.named_parameters()}
    _without_memory(module, masters=masters)
    mesh = init_device_mesh(device.type, (world.size,))
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    _fully_shard(module, mesh, precision)
    module._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu())
    load_rows(module.named_parameters(), lambda name, start, end: full[name][start:end])
    return ShardedPolicy(policy, dtype)


def load_rows(tensors: Iterable[tuple[str, Tensor]], rows: Callable[[str, int, int], Tensor]) -> None:
    """Fills this rank's part of each tensor with `rows(name, first, end)` of the whole."""
    with torch.no_grad():
        for name, tensor in tensors:
            first, part = own_rows(tensor)
            if part.numel():
                part.copy_(rows(name, first, first + part.shape[0]) if part.ndim else rows(name, 0, 0))


def idle_pass(module: nn.Module) -> Tensor:
    """A pass over a dummy row, for a rank without data: it joins the collectives of the others and adds no gradient."""
    device = next(module.parameters()).device
    nothing = torch.zeros((1, 2), dtype=torch.int64, device=device)
    return module(input_ids=nothing, use_cache=False, logits_to_keep=1).logits.float().sum() * 0.0


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: its `_no_split_modules`, or else its longest list of modules."""
    named = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [one for one in module.modules() if type(one).__name__ in named]
    if not blocks:
        lists = [one for one in module.modules() if isinstance(one, nn.ModuleList)]
        blocks = list(max(lists, key=len, default=nn.ModuleList()))
    return blocks


def _fully_shard(module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    for part in [*blocks_of(module), module]:
        fully_shard(part, mesh=mesh, mp_policy=precision)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)  # applies to this module only, not to its submodules
        part.set_force_sum_reduction_for_comms(True)


def _without_memory(module: nn.Module, *, masters: bool) -> None:
    """Replaces parameters by meta tensors; tied ones stay tied. Sharding must use no device before it is granted.

    The old memory is freed as soon as no caller holds it. With `masters`, trained parameters become float32.
    """
    empty: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if not parameter.is_floating_point():
                raise ConfigError(f"parameter {name!r} is {parameter.dtype}: quantised models cannot be sharded")
            if id(parameter) not in empty:
                dtype = torch.float32 if masters and parameter.requires_grad else parameter.dtype
                meta = torch.empty(parameter.shape, device="meta", dtype=dtype)
                empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            owner._parameters[name] = empty[id(parameter)]
