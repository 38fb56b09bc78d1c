"""Orders of a trainer's rank 0 to the other ranks, and their answers: one stream of frames per rank.

Rank 0 sends in the order in which it does things itself. Every rank trains in one thread that takes its work in that
order, so their collectives match.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from penstock.errors import PeerLost, RemoteProtocolError
from penstock.records.batch import Batch
from penstock.records.ids import PromptIndex, StepIndex, Version
from penstock.records.payload import RingAddress
from penstock.train.batch_metrics import SampleFacts
from penstock.train.objectives import Part
from penstock.wire.codec import DAMAGED

_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20


class TrainerRankAssignment(msgspec.Struct):
    """Settings of a rank, which it reads from standard input at its start."""

    rank: int
    ranks: int
    store: str
    channel_fd: int
    cell_fd: int
    checkpoint: str
    """The verified checkpoint to resume from; empty for none."""


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Fetch this share of the batch of a step."""

    batch: Batch
    rings: tuple[RingAddress, ...]


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """A share is here."""

    prompts: tuple[PromptIndex, ...]
    """Its groups, without those of `missing_prompts`."""
    missing_prompts: tuple[PromptIndex, ...]
    missing_reason: str
    facts: tuple[SampleFacts, ...]
    """Of every sample of `prompts`, in order."""


class Pack(msgspec.Struct, tag=True, frozen=True):
    """Pack the fetched share of a step, with these advantages of its samples."""

    step: StepIndex
    advantages: tuple[float, ...]


class Score(msgspec.Struct, tag=True, frozen=True):
    """Score the prepared share."""

    step: StepIndex


class Train(msgspec.Struct, tag=True, frozen=True):
    step: StepIndex


class Consume(msgspec.Struct, tag=True, frozen=True):
    """The step is acknowledged: its payloads may be overwritten."""

    step: StepIndex


class Snapshot(msgspec.Struct, tag=True, frozen=True):
    """Keep a copy of the shards as they are now."""

    version: Version
    writing: Version | None
    """The version that is being written; snapshots of others are dropped."""


class WriteParts(msgspec.Struct, tag=True, frozen=True):
    """Write the shards of a snapshot into the files of a version."""

    version: Version
    directory: str


class Save(msgspec.Struct, tag=True, frozen=True):
    """Take part in a checkpoint."""

    directory: str


class MoveIn(msgspec.Struct, tag=True, frozen=True):
    parts: tuple[Part, ...]


class MoveOut(msgspec.Struct, tag=True, frozen=True):
    """Move everything to the host."""


class MovedOut(msgspec.Struct, tag=True, frozen=True):
    left_bytes: int


class Done(msgspec.Struct, tag=True, frozen=True):
    pass


class End(msgspec.Struct, tag=True, frozen=True):
    """No order will follow."""


Order = Fetch | Pack | Score | Train | Consume | Snapshot | WriteParts | Save | MoveIn | MoveOut | End
Answer = Fetched | MovedOut | Done


class NumberedOrder(msgspec.Struct, array_like=True):
    number: int
    order: Order


class NumberedAnswer(msgspec.Struct, array_like=True):
    number: int
    answer: Answer


class Frames:
    """One end of the stream between rank 0 and another rank: an unnamed socket pair, which they inherit."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, end: socket.socket) -> Frames:
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: NumberedOrder | NumberedAnswer) -> None:
        body = self._encoder.encode(message)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    async def receive(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        """Raises PeerLost at the end of the stream."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            if length > MAX_FRAME_BYTES:
                raise RemoteProtocolError(f"a rank sent a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=kind)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerLost("the stream to another rank of this trainer ended") from error
        except DAMAGED as error:
            raise RemoteProtocolError(f"a rank sent a frame that cannot be read: {error}") from error

    def close(self) -> None:
        self._writer.close()
