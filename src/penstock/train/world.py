"""The process group of a trainer's ranks. Its collectives exchange small numbers in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class World:
    """A rank and its group. The default is a trainer of one process, which needs no group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """A gloo group. Collectives over it carry host memory."""

    @property
    def alone(self) -> bool:
        return self.group is None

    def total(self, *values: float) -> tuple[float, ...]:
        """Each value summed over all ranks."""
        if self.group is None:
            return values
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed, group=self.group)
        return tuple(summed.tolist())

    def largest(self, value: int) -> int:
        """The maximum over all ranks."""
        if self.group is None:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def merged(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of all ranks: sums are added; of those whose name ends in `_max` the largest is kept.

        A rank without data has no metrics, so names are exchanged too. No received data is unpickled.
        """
        if self.group is None:
            return dict(sums)
        merged: dict[str, float] = {}
        for body in self._gather(msgspec.msgpack.encode(dict(sums))):
            add_metrics(merged, msgspec.msgpack.decode(body, type=dict[str, float]))
        return merged

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def _gather(self, body: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(body)]), group=self.group)
        longest = int(max(lengths))
        frame = torch.frombuffer(bytearray(body.ljust(longest, b"\0")), dtype=torch.uint8)
        frames = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(frames, frame, group=self.group)
        return [one[: int(length)].numpy().tobytes() for one, length in zip(frames, lengths, strict=True)]


ALONE = World()


def add_metrics(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds in place; of metrics whose name ends in `_max` the larger is kept."""
    for name, value in more.items():
        sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0.0) + value
