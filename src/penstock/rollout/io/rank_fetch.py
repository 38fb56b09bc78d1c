"""The one collective of a worker of several ranks: every rank gives its news and gets those of all.

It breaks, and never hangs, when a rank is gone: a rank that cannot go on says why in the group's store and leaves; one
that dies without a word closes its connections. Either way the others' fetch ends at once, and they say whose fault it
was.
"""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PenstockError
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.rollout.cadence import Order
from penstock.runtime.ranks import FailureNotes, GroupStore, join_group

_HEADER = 8


class Orders(msgspec.Struct, array_like=True):
    """What rank 0 has to say."""

    order: Order
    leases: tuple[PromptLease, ...] = ()
    prefetch: bool = False
    manifest: Manifest | None = None
    """Weights that every rank is to load; said once."""
    discard: tuple[PayloadRef, ...] = ()
    """Payloads, in any rank's ring, that have no reader."""
    devices: tuple[int, ...] = ()
    """Of the pool, one for each rank to work on."""


class News(msgspec.Struct, array_like=True):
    """What one rank contributes to a fetch."""

    orders: Orders | None = None
    """Rank 0's."""
    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()
    resting: bool = False
    counts: dict[str, float] | None = None
    """Counters since the start, about once a second."""


class Fetch:
    """One rank's end of the collective."""

    def __init__(self, group: dist.ProcessGroup, store: GroupStore, *, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group
        self._notes = FailureNotes(store, rank=rank, ranks=ranks)
        self._frame_bytes = 1 << 16
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(News)

    def all_news(self, news: News) -> list[News]:
        """One collective of equal frames; a second, with larger frames from then on, when news of a rank do not fit.

        Every rank sees every length, so all of them decide alike. Nothing that came over a wire is unpickled.
        """
        body = self._encoder.encode(news)
        while True:
            frames = self._gather(body)
            lengths = [int(frame[:_HEADER].view(torch.int64)) for frame in frames]
            if max(lengths) + _HEADER <= self._frame_bytes:
                break
            self._frame_bytes = 1 << (max(lengths) + _HEADER).bit_length()
        return [
            self._decoder.decode(frame[_HEADER : _HEADER + length].numpy().tobytes())
            for frame, length in zip(frames, lengths, strict=True)
        ]

    def _gather(self, body: bytes) -> list[torch.Tensor]:
        frame = torch.zeros(self._frame_bytes, dtype=torch.uint8)
        frame[:_HEADER].view(torch.int64)[0] = len(body)
        fitting = body[: self._frame_bytes - _HEADER]
        frame[_HEADER : _HEADER + len(fitting)] = torch.frombuffer(bytearray(fitting), dtype=torch.uint8)
        frames = [torch.zeros_like(frame) for _ in range(self.ranks)]
        try:
            dist.all_gather(frames, frame, group=self._group)
        except RuntimeError as error:
            raise self.blame() or PeerLost(f"the fetch broke and no rank said why: {error}") from error
        return frames

    def tell(self, error: PenstockError) -> None:
        """Leaves the reason for the others to read."""
        self._notes.tell(error)

    def fail(self, error: PenstockError) -> None:
        """Tells the others why, then leaves the group so that whatever they wait for breaks."""
        self.tell(error)
        self.leave()

    def leave(self) -> None:
        """No collective will follow. Leaving twice is harmless."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def blame(self) -> PenstockError | None:
        """Which other rank broke a collective; None if no rank did."""
        return self._notes.blame()


def join(store: GroupStore, *, rank: int, ranks: int, timeout_s: float = 1800.0) -> Fetch:
    """Builds the process group and its fetch; every rank calls it once.

    `timeout_s` must exceed the longest generation: a dead rank is noticed at once, it only bounds a wedged one.
    """
    join_group(store, rank=rank, ranks=ranks, timeout_s=timeout_s)
    assert dist.group.WORLD is not None
    return Fetch(dist.group.WORLD, store, rank=rank, ranks=ranks, timeout_s=timeout_s)
