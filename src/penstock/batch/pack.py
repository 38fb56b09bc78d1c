"""From fetched samples to micro-batches of a bounded size: each array is copied once, into its place.

A language-model micro-batch is a rectangle of rows. A row holds one sequence, or several one after the other when
`row_tokens` allows it; `sequences` says which token belongs to which, so attention never crosses from one to the next.
Gymnasium episodes are joined end to end into one batch; the learner cuts it up again for each epoch.

Shape suffixes: R rows, T tokens in a row, N sequences or episodes, S environment steps, L layers, K experts.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.errors import RemoteProtocolError

Sample = Mapping[str, np.ndarray]

Spread = Callable[[Callable[[list[int]], "TokenMicroBatch"], list[list[int]]], "Iterable[TokenMicroBatch]"]
"""Like `map`; that of a thread pool, say: nearly all of packing is copying, which needs no interpreter."""

MAX_SEQUENCES = np.iinfo(np.int16).max
"""Sequences in one micro-batch: their index travels as int16."""


class PackSettings(msgspec.Struct, frozen=True):
    """How large a micro-batch may be."""

    micro_batch_tokens: int = 16_384
    """Rows times width, padding included. A single longer sequence is given a micro-batch of its own."""
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


def pack(
    samples: Sequence[Sample], advantages: np.ndarray, settings: PackSettings, *, spread: Spread = map
) -> list[MicroBatch]:
    """The micro-batches of one step. The kind of sample is known by its arrays; one batch holds one kind."""
    if not samples:
        return []
    if "token_ids" in samples[0]:
        return list(pack_tokens(samples, advantages, settings, spread=spread))
    return [pack_trajectories(samples)]


def pack_tokens(
    samples: Sequence[Sample], advantages: np.ndarray, settings: PackSettings, *, spread: Spread = map
) -> list[TokenMicroBatch]:
    """Micro-batches of rows of like width, the longest first. `spread` may fill them in several threads."""
    lengths = [len(sample["token_ids"]) for sample in samples]
    rows = plan_rows(lengths, settings.row_tokens)
    plan = plan_micro_batches([sum(lengths[i] for i in row) for row in rows], settings.micro_batch_tokens)
    return list(spread(lambda chosen: _fill(samples, advantages, [rows[row] for row in chosen]), plan))


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


def assign_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which samples each rank trains, so that the dearest rank is little dearer than the cheapest.

    Deterministic, and needs scalars only: every rank computes the whole assignment and fetches its own samples.
    """
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = heapq.heappop(loads)
        assigned[rank].append(index)
        heapq.heappush(loads, (load + costs[index], count + 1, rank))
    return [sorted(indices) for indices in assigned]


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


def _fill(samples: Sequence[Sample], advantages: np.ndarray, rows: list[list[int]]) -> TokenMicroBatch:
    order = [index for row in rows for index in row]
    width = max(sum(len(samples[i]["token_ids"]) for i in row) for row in rows)
    shape = (len(rows), width)
    token_ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    sequences = np.full(shape, -1, np.int16)
    loss_mask = np.zeros(shape, np.uint8)
    logprobs = np.zeros(shape, np.float32)
    experts: np.ndarray | None = None
    if (first := samples[order[0]].get("routed_experts")) is not None:
        # By far the largest: not cleared before it is written.
        experts = np.empty((*shape, *first.shape[1:]), first.dtype)
    count_up = np.arange(width, dtype=np.int32)
    sequence = 0
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            sample = samples[index]
            tokens = len(sample["token_ids"])
            end = start + tokens
            _check_aligned(sample, index, tokens, None if experts is None else experts.shape[2:])
            token_ids[row, start:end] = sample["token_ids"]
            positions[row, start:end] = count_up[:tokens]
            sequences[row, start:end] = sequence
            loss_mask[row, start:end] = sample["loss_mask"]
            logprobs[row, start:end] = sample["logprobs"]
            if experts is not None:
                experts[row, start:end] = sample["routed_experts"]
            start = end
            sequence += 1
        if experts is not None:
            experts[row, start:] = 0
    if not np.isfinite(logprobs).all():
        raise RemoteProtocolError("a sample's logprobs are not finite numbers: the engine that made them is broken")
    trained = np.bincount(sequences[loss_mask != 0], minlength=len(order))
    return TokenMicroBatch(
        token_ids_RT=token_ids,
        position_ids_RT=positions,
        sequences_RT=sequences,
        loss_mask_RT=loss_mask,
        logprobs_RT=logprobs,
        advantages_N=np.asarray(advantages, np.float32)[order],
        trained_tokens_N=trained,
        packed=len(order) > len(rows),
        routed_experts_RTLK=experts,
    )


def _check_aligned(sample: Sample, index: int, tokens: int, experts: tuple[int, ...] | None) -> None:
    """Every stream has one entry per token, and no first token is trained: nothing predicts it."""
    mask = sample["loss_mask"]
    aligned = tokens > 0 and len(mask) == tokens == len(sample["logprobs"]) and not mask[0]
    routed = sample.get("routed_experts")
    if aligned and (None if routed is None else routed.shape) == (None if experts is None else (tokens, *experts)):
        return
    streams = ", ".join(f"{name} {array.shape}" for name, array in sample.items())
    raise RemoteProtocolError(
        f"sample {index} of the batch is inconsistent: it needs one entry per token in each stream, the same streams "
        f"as its neighbours and an untrained first token; it has {streams}"
    )
