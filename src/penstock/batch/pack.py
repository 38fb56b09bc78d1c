"""From fetched samples to micro-batches of a bounded size: each array is copied once, into its place.

A language-model micro-batch is a rectangle of rows. A row holds one sequence, or several one after the other when
`row_tokens` allows it; `sequences` says which token belongs to which, so attention never crosses from one to the next.
All its arrays lie in one piece of memory, which can be used again for another step: fresh memory costs as much as the
copy itself. Gymnasium episodes are joined end to end into one batch; the learner cuts it up again for each epoch.

Shape suffixes: R rows, T tokens in a row, N sequences or episodes, S environment steps, L layers, K experts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.batch.assemble import Sample, TokenSequence, sequences_of
from penstock.errors import RemoteProtocolError

Allocate = Callable[[int], np.ndarray]
"""Memory of at least so many bytes, as uint8; what it holds does not matter."""

Spread = Callable[[Callable[[list[int]], "TokenMicroBatch"], list[list[int]]], "Iterable[TokenMicroBatch]"]
"""Like `map`; that of a thread pool, say: nearly all of packing is copying, which needs no interpreter."""

MAX_SEQUENCES = np.iinfo(np.int16).max
"""Sequences in one micro-batch: their index travels as int16."""
ALIGNMENT_BYTES = 64


class PackSettings(msgspec.Struct, frozen=True):
    """How large a micro-batch may be."""

    micro_batch_tokens: int = 16_384
    """Rows times width, padding included. A single longer sequence is given a micro-batch of its own."""
    micro_batches: int = 1
    """At least so many, if there are as many rows: one for each update."""
    row_tokens: int = 0
    """Sequences are packed together into rows of up to this many tokens; 0 gives each its own row."""


@dataclass(frozen=True, slots=True)
class TokenMicroBatch:
    """Sequences of tokens, with all that the loss needs. Padding has sequence -1 and token 0."""

    token_ids_RT: np.ndarray
    position_ids_RT: np.ndarray
    sequences_RT: np.ndarray
    """int16: which of the N sequences the token belongs to."""
    loss_mask_RT: np.ndarray
    logprobs_RT: np.ndarray
    advantages_N: np.ndarray
    trained_tokens_N: np.ndarray
    sample_tokens_N: np.ndarray
    """Trained tokens of the whole sample that the sequence is a branch of, here or in other micro-batches."""
    packed: bool
    """Some row holds more than one sequence."""
    routed_experts_RTLK: np.ndarray | None = None

    @property
    def size_bytes(self) -> int:
        """All arrays together."""
        return sum(a.nbytes for name in self.__slots__ if isinstance(a := getattr(self, name), np.ndarray))


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """Whole episodes, end to end."""

    observations_S: np.ndarray
    actions_S: np.ndarray
    logprobs_S: np.ndarray
    rewards_S: np.ndarray
    lengths_N: np.ndarray
    terminated_N: np.ndarray
    """1 where the environment ended the episode; 0 where it was cut off and the last observation has a future."""
    last_observations_N: np.ndarray


MicroBatch = TokenMicroBatch | TrajectoryBatch


def fresh(size_bytes: int) -> np.ndarray:
    """Memory that was never used before."""
    return np.empty(size_bytes, np.uint8)


def pack(
    samples: Sequence[Sample],
    advantages: np.ndarray,
    settings: PackSettings,
    *,
    spread: Spread = map,
    allocate: Allocate = fresh,
) -> list[MicroBatch]:
    """The micro-batches of one step. The kind of sample is known by its arrays; one batch holds one kind."""
    if not samples:
        return []
    if "token_ids" in samples[0]:
        return list(pack_tokens(samples, advantages, settings, spread=spread, allocate=allocate))
    return [pack_trajectories(samples)]


def pack_tokens(
    samples: Sequence[Sample],
    advantages: np.ndarray,
    settings: PackSettings,
    *,
    spread: Spread = map,
    allocate: Allocate = fresh,
) -> list[TokenMicroBatch]:
    """Micro-batches of rows of like width, the longest first. `spread` may fill them in several threads.

    Each takes its memory from `allocate`, once; the micro-batch is good until that memory is used again.
    """
    sequences = sequences_of(samples)
    sample_tokens = np.zeros(len(samples), np.int64)
    for sequence in sequences:
        sample_tokens[sequence.sample] += np.count_nonzero(sequence.loss_mask)
    lengths = [sequence.tokens for sequence in sequences]
    rows = plan_rows(lengths, settings.row_tokens)
    widths = [sum(lengths[i] for i in row) for row in rows]
    plan = plan_micro_batches(widths, min(settings.micro_batch_tokens, -(-sum(widths) // settings.micro_batches)))

    def fill(chosen: list[int]) -> TokenMicroBatch:
        return _fill(
            samples, [[sequences[i] for i in rows[row]] for row in chosen], advantages, sample_tokens, allocate
        )

    return list(spread(fill, plan))


def plan_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Which sequences share a row: each, longest first, goes where it leaves the least room."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in order:
        size = lengths[index]
        at = bisect.bisect_left(room, (size, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > size:
            bisect.insort(room, (free - size, row))
    return rows


def plan_micro_batches(widths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Which rows share a micro-batch: rows of like width together, so that little is padding."""
    batches: list[list[int]] = []
    widest = 0
    for row in sorted(range(len(widths)), key=lambda i: -widths[i]):
        if not batches or (len(batches[-1]) + 1) * widest > micro_batch_tokens or len(batches[-1]) >= MAX_SEQUENCES:
            batches.append([])
            widest = widths[row]
        batches[-1].append(row)
    return batches


def pack_trajectories(samples: Sequence[Sample]) -> TrajectoryBatch:
    """All episodes in one batch, each array joined once."""
    for index, sample in enumerate(samples):
        steps = len(sample["observations"])
        if not steps or any(len(sample[name]) != steps for name in ("actions", "logprobs", "rewards")):
            streams = ", ".join(f"{name} {array.shape}" for name, array in sample.items())
            raise RemoteProtocolError(f"episode {index} of the batch is empty or inconsistent: {streams}")
    return TrajectoryBatch(
        observations_S=np.concatenate([sample["observations"] for sample in samples]),
        actions_S=np.concatenate([sample["actions"] for sample in samples]),
        logprobs_S=np.concatenate([sample["logprobs"] for sample in samples]),
        rewards_S=np.concatenate([sample["rewards"] for sample in samples]),
        lengths_N=np.array([len(sample["observations"]) for sample in samples], np.int64),
        terminated_N=np.concatenate([sample["terminated"] for sample in samples]),
        last_observations_N=np.stack([sample["last_observation"] for sample in samples]),
    )


def _fill(
    samples: Sequence[Sample],
    rows: list[list[TokenSequence]],
    advantages: np.ndarray,
    sample_tokens: np.ndarray,
    allocate: Allocate,
) -> TokenMicroBatch:
    order = [sequence for row in rows for sequence in row]
    width = max(sum(sequence.tokens for sequence in row) for row in rows)
    routing = samples[order[0].sample].get("routed_experts")
    experts_row = None if routing is None else routing.shape[1:]
    places = _Places(allocate, len(rows), width, routing)
    count_up = np.arange(width, dtype=np.int32)
    number = 0
    for row, members in enumerate(rows):
        start = 0
        for sequence in members:
            sample = samples[sequence.sample]
            _check_aligned(sample, sequence, experts_row)
            end = start + sequence.tokens
            places.position_ids[row, start:end] = count_up[: sequence.tokens]
            places.sequences[row, start:end] = number
            places.loss_mask[row, start:end] = sequence.loss_mask
            for low, high in sequence.stretches:
                end = start + high - low
                places.token_ids[row, start:end] = sample["token_ids"][low:high]
                places.logprobs[row, start:end] = sample["logprobs"][low:high]
                if places.experts is not None:
                    places.experts[row, start:end] = sample["routed_experts"][low:high]
                start = end
            number += 1
        places.blank(row, start)
    if not np.isfinite(places.logprobs).all():
        raise RemoteProtocolError("a sample's logprobs are not finite numbers: the engine that made them is broken")
    trained = np.bincount(places.sequences[places.loss_mask != 0], minlength=len(order))
    owners = [sequence.sample for sequence in order]
    return TokenMicroBatch(
        token_ids_RT=places.token_ids,
        position_ids_RT=places.position_ids,
        sequences_RT=places.sequences,
        loss_mask_RT=places.loss_mask,
        logprobs_RT=places.logprobs,
        advantages_N=np.asarray(advantages, np.float32)[owners],
        trained_tokens_N=trained,
        sample_tokens_N=sample_tokens[owners],
        packed=len(order) > len(rows),
        routed_experts_RTLK=places.experts,
    )


class _Places:
    """The arrays of a micro-batch, side by side in one piece of memory. What they hold is undefined until written."""

    def __init__(self, allocate: Allocate, rows: int, width: int, routing: np.ndarray | None) -> None:
        layout: list[tuple[tuple[int, ...], Any]] = [
            ((rows, width), np.int32),
            ((rows, width), np.int32),
            ((rows, width), np.int16),
            ((rows, width), np.uint8),
            ((rows, width), np.float32),
        ]
        if routing is not None:
            layout.append(((rows, width, *routing.shape[1:]), routing.dtype))
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout]
        room = [size + -size % ALIGNMENT_BYTES for size in sizes]
        memory = allocate(sum(room))
        starts = [sum(room[:index]) for index in range(len(room))]
        arrays = [
            memory[start : start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, layout, strict=True)
        ]
        self.token_ids, self.position_ids, self.sequences, self.loss_mask, self.logprobs = arrays[:5]
        self.experts = arrays[5] if routing is not None else None

    def blank(self, row: int, start: int) -> None:
        """From that token on the row is padding."""
        for array in (self.token_ids, self.position_ids, self.loss_mask, self.logprobs, self.experts):
            if array is not None:
                array[row, start:] = 0
        self.sequences[row, start:] = -1


def _check_aligned(sample: Sample, sequence: TokenSequence, experts_row: tuple[int, ...] | None) -> None:
    """Every stream has one entry per token, and no first token is trained: nothing predicts it."""
    tokens = len(sample["token_ids"])
    aligned = len(sample["loss_mask"]) == tokens == len(sample["logprobs"])
    routed = sample.get("routed_experts")
    routing = None if experts_row is None else (tokens, *experts_row)
    if (
        aligned
        and sequence.tokens
        and not sequence.loss_mask[0]
        and (None if routed is None else routed.shape) == routing
    ):
        return
    streams = ", ".join(f"{name} {array.shape}" for name, array in sample.items())
    raise RemoteProtocolError(
        f"sample {sequence.sample} of the batch is inconsistent: it needs one entry per token in each stream, the same "
        f"streams as its neighbours and an untrained first token; it has {streams}"
    )
