"""One model sharded over several ranks: rank 0 is the engine, and the other ranks execute its commands.

Only rank 0 has requests, seating, draws and versions. Before it changes its cache or runs its model, it sends the
same command to the other ranks, through a socket to each; then all ranks execute it, with the collectives of the
model (`tp_plan` of transformers). Rank 0 draws the tokens and broadcasts them, so that the ranks cannot diverge.

Rank 0 also keeps the whole model in host memory. A version is staged, verified and swapped there, as on one
rank; before the next step every rank loads its shard: all change their weights between the same two steps.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engines.architecture import text_config
from penstock.engines.requests import Sampling
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.decoding import Decoding, Output
from penstock.engines.torch.kernels import use_fewer_kernels
from penstock.engines.torch.sampling import Kind, SamplingParams, draw
from penstock.errors import ConfigError, PeerLost
from penstock.runtime.ranks import file_store, join_group

LENGTH_BYTES = 4
COLLECTIVE_S = 600.0
"""Longest wait for the slowest rank inside a forward. A dead rank is detected at once."""


# Commands of rank 0 to the others


class MakeRoom(msgspec.Struct, frozen=True, tag="make_room"):
    rows: int
    columns: int
    used_rows: int


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    source: int
    targets: list[int]
    columns: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Free the cache."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    pass


class Park(msgspec.Struct, frozen=True, tag="park"):
    place: int | None
    """None: all."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    source: int
    target: int


class Read(msgspec.Struct, frozen=True, tag="read"):
    places: list[int]
    ids: list[list[int]]
    positions: list[list[int]]
    columns: int


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    places: list[int]
    positions: list[int]
    kind: Kind


class Step(msgspec.Struct, frozen=True, tag="step"):
    rows: int
    columns: int
    kind: Kind
    """Only rank 0 samples, but all ranks must capture a new kind of step together: a step has collectives."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load the shard of every weight; rank 0 broadcasts the weights one by one."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    pass


Command = MakeRoom | Copy | Drop | Allocate | Park | Move | Read | Enter | Step | Load | Leave
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Command).decode


class ShardGroup:
    """This process as one of the ranks of an engine."""

    def __init__(self, store: Path, rank: int, ranks: int, sockets: Sequence[socket.socket], device: torch.device):
        """Returns when all ranks have joined. `sockets`: rank 0's to each other rank, or another rank's to rank 0."""
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        join_group(file_store(store, ranks), rank=rank, ranks=ranks, timeout_s=COLLECTIVE_S, backend=backend)
        self.rank = rank
        self.device = device
        self.mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
        self._sockets = sockets
        self._peer_lost = False

    def send(self, command: Command) -> None:
        """Rank 0: sends the next command to the other ranks. Raises PeerLost when one of them has ended."""
        body = _encode(command)
        try:
            for one in self._sockets:
                one.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        except OSError as error:
            lost, self._peer_lost = self._peer_lost, True
            if not lost:
                raise PeerLost(f"a rank of the engine has ended: {error}") from error

    def receive(self) -> Command:
        """Another rank: the next command. Raises PeerLost when rank 0 has ended."""
        return _decode(self._received(int.from_bytes(self._received(LENGTH_BYTES), "little")))

    def _received(self, size_bytes: int) -> bytes:
        parts: list[bytes] = []
        while size_bytes:
            part = self._sockets[0].recv(size_bytes)
            if not part:
                raise PeerLost("rank 0 of the engine has ended")
            parts.append(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def broadcast(self, tensor: Tensor) -> None:
        """Copies rank 0's values to all ranks."""
        dist.broadcast(tensor, src=0)

    def draw(
        self, logits_BV: Tensor, params: SamplingParams, kind: Kind, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Rank 0 draws, the others receive its tokens."""
        if self.rank == 0:
            tokens_B, logprobs_B = draw(logits_BV, params, kind, generator)
            tokens_B = tokens_B.contiguous()
        else:
            tokens_B = torch.empty(len(logits_BV), dtype=torch.long, device=logits_BV.device)
            logprobs_B = torch.zeros(len(logits_BV), device=logits_BV.device)
        self.broadcast(tokens_B)
        return tokens_B, logprobs_B

    def close(self) -> None:
        if self.rank == 0:
            self.send(Leave())
        for one in self._sockets:
            one.close()


class Shards:
    """A rank's shard of the model. Raises ConfigError for a model that cannot be sharded."""

    def __init__(self, model: nn.Module, group: ShardGroup) -> None:
        """`model` is whole. It is sharded in place; rank 0 shards a copy."""
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        self.group = group
        self.held = ""
        """Digest of the weights in the shards."""
        self._whole_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        _check_divides(model, group.mesh.size())
        sharded = copy.deepcopy(model) if group.rank == 0 else model
        apply_tensor_parallelism(sharded, group.mesh)
        self.model = sharded.to(group.device).eval().requires_grad_(False)
        use_fewer_kernels(self.model)

    @property
    def device(self) -> torch.device:
        return self.group.device

    def fetch(self, whole: nn.Module, digest: str) -> None:
        """Rank 0, between two steps: all ranks load the weights of the whole model, unless they have this digest."""
        if self.held != digest:
            self.group.send(Load())
            self.load(dict(whole.named_parameters(remove_duplicate=False)))
            self.held = digest

    def load(self, whole: dict[str, Any] | None = None) -> None:
        """Loads this rank's shard of every parameter. Called on all ranks; rank 0 passes the whole parameters."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parts: dict[str, Any] = dict(self.model.named_parameters(remove_duplicate=False))
        sent: dict[int, Tensor] = {}
        with torch.no_grad():
            for name in self._whole_names:
                part = parts[name]
                if whole is None:
                    full = torch.empty(part.shape, dtype=part.dtype)
                elif (full := sent.get(id(whole[name]))) is None:
                    full = sent[id(whole[name])] = whole[name].detach().cpu().contiguous()
                self.group.broadcast(full)
                if isinstance(part, DTensor):
                    mine = distribute_tensor(
                        full.to(self.device), part.device_mesh, part.placements, src_data_rank=None
                    )
                    part.to_local().copy_(mine.to_local())
                else:
                    part.copy_(full)

    def follow(self, rows: int, cache_tokens: int, *, graphs: bool) -> None:
        """Another rank: executes the commands of rank 0 until `Leave`."""
        cache = RowCache(self.model, rows, cache_tokens)
        decoding = Decoding(self.model, cache, graphs=graphs, draw=self.group.draw)
        generator = torch.Generator(device=self.device)  # not used: rank 0 draws
        logits = torch.empty(0)
        with torch.inference_mode():
            while True:
                match self.group.receive():
                    case MakeRoom(rows, columns, used_rows):
                        cache.make_room(rows, columns, used_rows)
                    case Copy(source, targets, columns):
                        cache.copy(source, targets, columns)
                    case Drop():
                        cache.drop()
                        decoding.drop()
                    case Allocate():
                        decoding.allocate()
                    case Park(int(place)):
                        decoding.park(place)
                    case Park():
                        decoding.park_all()
                    case Move(source, target):
                        decoding.move(source, target)
                    case Read(places, ids, positions, columns):
                        logits = decoding.read(places, np.array(ids), np.array(positions), columns)
                    case Enter(places, positions, kind):
                        samplings = [Sampling(max_new_tokens=1)] * len(places)
                        drawn = logits[:1].expand(len(places), -1)
                        decoding.enter(places, positions, samplings, kind, drawn, generator)
                    case Step(rows, columns, kind):
                        decoding.step(rows, columns, kind, generator)
                    case Load():
                        self.load()
                    case Leave():
                        return


class LeadingCache(RowCache):
    """Rank 0's cache: sends every change to the other ranks."""

    def __init__(self, shards: Shards, rows: int, tokens: int) -> None:
        super().__init__(shards.model, rows, tokens)
        self._group = shards.group

    def make_room(self, rows: int, columns: int, used_rows: int) -> bool:
        if rows <= self.shape[0] and columns <= self.shape[1]:
            return False
        self._group.send(MakeRoom(rows, columns, used_rows))
        return super().make_room(rows, columns, used_rows)

    def drop(self) -> None:
        self._group.send(Drop())
        super().drop()

    def copy(self, source: int, targets: list[int], columns: int) -> None:
        if targets:
            self._group.send(Copy(source, targets, columns))
        super().copy(source, targets, columns)


class LeadingDecoding(Decoding):
    """Rank 0's steps: sends every step to the other ranks."""

    def __init__(self, shards: Shards, cache: RowCache, *, graphs: bool) -> None:
        super().__init__(shards.model, cache, graphs=graphs, draw=shards.group.draw)
        self._group = shards.group

    def allocate(self) -> None:
        self._group.send(Allocate())
        super().allocate()

    def park(self, place: int) -> None:
        self._group.send(Park(place))
        super().park(place)

    def park_all(self) -> None:
        self._group.send(Park(None))
        super().park_all()

    def move(self, source: int, target: int) -> None:
        self._group.send(Move(source, target))
        super().move(source, target)

    def read(self, places: Sequence[int], ids_BQ: Any, positions_BQ: Any, columns: int) -> Tensor:
        self._group.send(Read(list(places), ids_BQ.tolist(), positions_BQ.tolist(), columns))
        return super().read(places, ids_BQ, positions_BQ, columns)

    def enter(
        self,
        places: Sequence[int],
        positions: Sequence[int],
        samplings: Sequence[Sampling],
        kind: Kind,
        logits_BV: Tensor,
        generator: torch.Generator,
    ) -> Output:
        self._group.send(Enter(list(places), list(positions), kind))
        return super().enter(places, positions, samplings, kind, logits_BV, generator)

    def step(self, rows: int, columns: int, kind: Kind, generator: torch.Generator) -> Output:
        self._group.send(Step(rows, columns, kind))
        return super().step(rows, columns, kind, generator)


def _check_divides(model: nn.Module, ranks: int) -> None:
    config = text_config(model)
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise ConfigError("engine.tensor_parallel above 1 does not support adapters; set it to 1, or use vLLM")
    if not getattr(model, "tp_plan", None):
        raise ConfigError(f"engine.tensor_parallel: transformers has no plan to shard a {name}; serve it with vLLM")
    heads = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    for key, count in heads.items():
        if count is not None and count % ranks:
            raise ConfigError(f"engine.tensor_parallel = {ranks} does not divide the model's {key} = {count}")
