"""The fetch, the one collective of a worker of several ranks: every rank sends its report and receives all reports.

It never hangs when a rank is lost. A rank that cannot continue writes its error to the group's store and leaves the
group; a rank that dies closes its connections. In both cases the fetch of the others fails at once, and their error
names the lost rank.
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
    """Rank 0's part of a fetch, for all ranks."""

    order: Order
    leases: tuple[PromptLease, ...] = ()
    prefetch: bool = False
    manifest: Manifest | None = None
    """Weights that every rank must load; sent once."""
    discard: tuple[PayloadRef, ...] = ()
    """Payloads, in any rank's ring, that have no reader."""
    devices: tuple[int, ...] = ()
    """Devices of the pool, one for each rank."""


class RankReport(msgspec.Struct, array_like=True):
    """One rank's part of a fetch."""

    orders: Orders | None = None
    """Only in rank 0's report."""
    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()
    paused: bool = False
    counts: dict[str, float] | None = None
    """Counters since the start; sent about once a second."""


class Fetch:
    """One rank's side of the collective."""

    def __init__(self, group: dist.ProcessGroup, store: GroupStore, *, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group
        self._notes = FailureNotes(store, rank=rank, ranks=ranks)
        self._frame_bytes = 1 << 16
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankReport)

    def gather_reports(self, report: RankReport) -> list[RankReport]:
        """Returns the reports of all ranks, by one all-gather of equal frames.

        If a report does not fit, all ranks repeat it with larger frames and keep that size: every rank sees every
        length, so all decide the same. Received bytes are never unpickled.
        """
        body = self._encoder.encode(report)
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
            raise self.find_cause() or PeerLost(f"the fetch failed and no rank reported a cause: {error}") from error
        return frames

    def report_failure(self, error: PenstockError) -> None:
        """Writes the error to the group's store, for the other ranks."""
        self._notes.report(error)

    def fail(self, error: PenstockError) -> None:
        """Writes the error to the group's store, then leaves the group, so that the others' collectives fail."""
        self.report_failure(error)
        self.leave()

    def leave(self) -> None:
        """Leaves the group: no collective may follow. A second call does nothing."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()

    def find_cause(self) -> PenstockError | None:
        """The error of the rank that broke a collective; None if no rank did."""
        return self._notes.find_cause()


def join(store: GroupStore, *, rank: int, ranks: int, timeout_s: float = 1800.0) -> Fetch:
    """Builds the process group and its fetch; every rank calls it once.

    `timeout_s` must exceed the longest generation. It bounds a wedged rank only: a dead rank is noticed at once.
    """
    join_group(store, rank=rank, ranks=ranks, timeout_s=timeout_s)
    assert dist.group.WORLD is not None
    return Fetch(dist.group.WORLD, store, rank=rank, ranks=ranks, timeout_s=timeout_s)
