"""Packs fetched samples into micro-batches of a bounded size: each array is copied once, into its place.

A language-model micro-batch is usually one row without padding. For models that do not support this, it is a rectangle
of rows with one sequence each. In a row without padding, sequences that begin with the same tokens may share them: the
row is then a forest of segments, in which a token is read, and its gradient computed, once. All its arrays are in one
block of memory, which can be reused for another step: new memory costs as much as the copy itself. Gymnasium episodes
are concatenated into one batch; the learner splits it again for each epoch.

Shape suffixes: R rows, T tokens in a row, N sequences or episodes, S environment steps, L layers, K experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.batch.assemble import Sample, TokenSequence, sequences_of
from penstock.errors import RemoteProtocolError

Allocate = Callable[[int], np.ndarray]
"""Returns memory of at least that many bytes, as uint8; its content does not matter."""

Spread = Callable[[Callable[[list[int]], "TokenMicroBatch"], list[list[int]]], "Iterable[TokenMicroBatch]"]
"""Like `map`, for example of a thread pool: packing is mostly copying, which needs no interpreter."""

MAX_SEQUENCES = np.iinfo(np.int16).max
"""Sequences in one micro-batch: their index is stored as int16."""
ALIGNMENT_BYTES = 64


Packing = Literal["padded", "packed", "prefix"]


MICRO_BATCH_TOKENS = 16_384


class PackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Size and layout of micro-batches."""

    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Rows times width, padding included. A longer sequence gets its own micro-batch."""
    micro_batches: int = 1
    """Minimum number of micro-batches, or of sequences if there are fewer: one for each update."""
    layout: Packing
    """`padded`: one sequence per row; `packed`: one row without padding; `prefix`: also shares common beginnings."""


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
    segments_K3: np.ndarray | None = None
    """Of the one row without padding, in order: first token, token after the last, and the parent segment or -1."""
    routed_experts_RTLK: np.ndarray | None = None

    @property
    def samples(self) -> float:
        """Number of samples, also of those without a trained token. One whose branches are in several micro-batches
        counts in each with its share of trained tokens."""
        shares_N = self.trained_tokens_N / np.maximum(self.sample_tokens_N, 1)
        return float(np.where(self.sample_tokens_N > 0, shares_N, 1.0).sum())  # an untrained sample is one sequence

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
    """Newly allocated memory."""
    return np.empty(size_bytes, np.uint8)


def pack(
    samples: Sequence[Sample],
    advantages: np.ndarray,
    settings: PackSettings,
    *,
    spread: Spread = map,
    allocate: Allocate = fresh,
) -> list[MicroBatch]:
    """The micro-batches of one step. The arrays of the first sample give the kind; one batch holds one kind."""
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
    """Micro-batches of at most `settings.micro_batch_tokens` tokens. `spread` may fill them in several threads.

    Each takes its memory from `allocate`, once; the micro-batch is valid until that memory is reused.
    """
    sequences = sequences_of(samples)
    routing = samples[0].get("routed_experts") if samples else None
    for sequence in sequences:
        _check_aligned(samples[sequence.sample], sequence, None if routing is None else routing.shape[1:])
    sample_tokens = np.zeros(len(samples), np.int64)
    for sequence in sequences:
        sample_tokens[sequence.sample] += np.count_nonzero(sequence.loss_mask)
    share = settings.layout == "prefix" and routing is None
    forests: list[Any] = []
    plan: list[list[int]] = []
    limit = settings.micro_batch_tokens
    if settings.micro_batches > 1:
        total = sum(sequence.tokens for sequence in sequences)
        if share:
            whole = plan_forests(samples, sequences, limit, share=True)
            total = sum(node.end - node.start for nodes, _ in whole for node in nodes)
        limit = min(limit, -(-total // settings.micro_batches))
    while True:
        if settings.layout == "padded":
            plan = plan_micro_batches([sequence.tokens for sequence in sequences], limit)
        else:
            forests = plan_forests(samples, sequences, limit, share=share)
            plan = [[number] for number in range(len(forests))]
        if len(plan) >= min(settings.micro_batches, len(sequences)):
            break
        limit = limit * 9 // 10  # shared tokens and the fill of each micro-batch show only in the plan

    def fill(chosen: list[int]) -> TokenMicroBatch:
        if settings.layout == "padded":
            members = [sequences[i] for i in chosen]
            places = _fill_rows(samples, members, allocate)
            return _micro_batch(places, members, advantages, sample_tokens, None)
        [number] = chosen
        nodes, members = forests[number]
        places, segments = _fill_forest(samples, nodes, members, allocate)
        return _micro_batch(places, members, advantages, sample_tokens, segments)

    return list(spread(fill, plan))


@dataclass(slots=True)
class Node:
    """Tokens `start` to `end` of a sequence; the parent has those before."""

    sequence: int
    start: int
    end: int
    parent: int


def plan_forests(
    samples: Sequence[Sample], sequences: Sequence[TokenSequence], limit: int, *, share: bool
) -> list[tuple[list[Node], list[TokenSequence]]]:
    """Puts the sequences, in order, into forests of at most `limit` tokens. Neighbours share their common beginning.

    A sequence shares tokens up to the first that it trains. Tokens that an earlier branch of the sample trains are
    trained there.
    """
    forests: list[tuple[list[Node], list[TokenSequence]]] = []
    tokens = 0
    path: list[int] = []
    before = np.zeros(0, np.int32)
    for sequence in sequences:
        own = _tokens_of(samples, sequence)
        trained = int(np.argmax(sequence.loss_mask)) if sequence.loss_mask.any() else len(own)
        shared = _common(before, own, trained) if share and forests else 0
        full = forests and (tokens + len(own) - shared > limit or len(forests[-1][1]) >= MAX_SEQUENCES)
        if not forests or full:
            forests.append(([], []))
            tokens, path, shared = 0, [], 0
        nodes, members = forests[-1]
        path = _cut(nodes, path, shared)
        if shared < len(own):
            nodes.append(Node(len(members), shared, len(own), path[-1] if path else -1))
            path = [*path, len(nodes) - 1]
        members.append(sequence)
        tokens += len(own) - shared
        before = own
    return forests


def _cut(nodes: list[Node], path: list[int], at: int) -> list[int]:
    """The part of the path before token `at`, which the next sequence extends; splits a node that contains it."""
    kept = [number for number in path if nodes[number].end <= at]
    if len(kept) < len(path):
        number = path[len(kept)]
        node = nodes[number]
        if node.start < at:
            for child in nodes:
                if child.parent == number:
                    child.parent = len(nodes)
            nodes.append(Node(node.sequence, at, node.end, number))
            node.end = at
            kept.append(number)
    return kept


def _common(before: np.ndarray, own: np.ndarray, limit: int) -> int:
    """The length of the common beginning, at most `limit`."""
    size = min(len(before), len(own), limit)
    differ = np.flatnonzero(before[:size] != own[:size])
    return int(differ[0]) if len(differ) else size


def _tokens_of(samples: Sequence[Sample], sequence: TokenSequence) -> np.ndarray:
    return _joined(samples[sequence.sample]["token_ids"], sequence)


def _joined(stream: np.ndarray, sequence: TokenSequence) -> np.ndarray:
    pieces = [stream[low:high] for low, high in sequence.stretches]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def plan_micro_batches(widths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Groups rows of similar width into micro-batches, to keep padding small."""
    batches: list[list[int]] = []
    widest = 0
    for row in sorted(range(len(widths)), key=lambda i: -widths[i]):
        if not batches or (len(batches[-1]) + 1) * widest > micro_batch_tokens or len(batches[-1]) >= MAX_SEQUENCES:
            batches.append([])
            widest = widths[row]
        batches[-1].append(row)
    return batches


def pack_trajectories(samples: Sequence[Sample]) -> TrajectoryBatch:
    """All episodes in one batch; each array is concatenated once."""
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


def _fill_rows(samples: Sequence[Sample], members: Sequence[TokenSequence], allocate: Allocate) -> _Places:
    """One sequence in each row."""
    width = max(sequence.tokens for sequence in members)
    routing = samples[members[0].sample].get("routed_experts")
    places = _Places(allocate, len(members), width, routing)
    for row, sequence in enumerate(members):
        places.put(row, 0, samples[sequence.sample], sequence, 0, sequence.tokens, number=row)
        places.blank(row, sequence.tokens)
    return places


def _fill_forest(
    samples: Sequence[Sample], nodes: Sequence[Node], members: Sequence[TokenSequence], allocate: Allocate
) -> tuple[_Places, np.ndarray]:
    """All nodes in one row, parents before children; returns the places and the segments."""
    routing = samples[members[0].sample].get("routed_experts")
    places = _Places(allocate, 1, sum(node.end - node.start for node in nodes), routing)
    order = sorted(range(len(nodes)), key=lambda number: (nodes[number].start, number))
    place = {number: at for at, number in enumerate(order)} | {-1: -1}
    segments = np.empty((len(nodes), 3), np.int64)
    start = 0
    for at, number in enumerate(order):
        node = nodes[number]
        sequence = members[node.sequence]
        end = start + node.end - node.start
        places.put(0, start, samples[sequence.sample], sequence, node.start, node.end, number=node.sequence)
        segments[at] = start, end, place[node.parent]
        start = end
    return places, segments


def _micro_batch(
    places: _Places,
    members: Sequence[TokenSequence],
    advantages: np.ndarray,
    sample_tokens: np.ndarray,
    segments: np.ndarray | None,
) -> TokenMicroBatch:
    if not np.isfinite(places.logprobs).all():
        raise RemoteProtocolError("a sample's logprobs are not finite numbers: the engine that made them is broken")
    owners = [sequence.sample for sequence in members]
    return TokenMicroBatch(
        token_ids_RT=places.token_ids,
        position_ids_RT=places.position_ids,
        sequences_RT=places.sequences,
        loss_mask_RT=places.loss_mask,
        logprobs_RT=places.logprobs,
        advantages_N=np.asarray(advantages, np.float32)[owners],
        trained_tokens_N=np.bincount(places.sequences[places.loss_mask != 0], minlength=len(members)),
        sample_tokens_N=sample_tokens[owners],
        segments_K3=segments,
        routed_experts_RTLK=places.experts,
    )


def halved(batch: TokenMicroBatch) -> list[tuple[TokenMicroBatch, np.ndarray]]:
    """Splits a micro-batch in two, each with the indices of its trained tokens; one if it cannot be split."""
    parts = _halves_of_rows(batch) if batch.segments_K3 is None else _halves_of_forest(batch)
    numbers = np.cumsum(batch.loss_mask_RT.ravel() != 0).reshape(batch.loss_mask_RT.shape) - 1
    found: list[tuple[TokenMicroBatch, np.ndarray]] = []
    for (rows, columns), segments, mask in parts:
        cut = {
            name: getattr(batch, name)[rows][:, columns]
            for name in ("token_ids_RT", "position_ids_RT", "sequences_RT", "logprobs_RT")
        }
        trained = np.bincount(cut["sequences_RT"][mask != 0], minlength=len(batch.trained_tokens_N))
        rest = {"loss_mask_RT": mask, "trained_tokens_N": trained, "segments_K3": segments}
        found.append((replace(batch, **cut, **rest), numbers[rows][:, columns][mask != 0]))
    return found


def _halves_of_rows(batch: TokenMicroBatch) -> list[tuple[tuple[np.ndarray, np.ndarray], None, np.ndarray]]:
    rows, width = batch.token_ids_RT.shape
    halves = np.array_split(np.arange(rows), min(2, rows))
    return [((half, np.arange(width)), None, batch.loss_mask_RT[half]) for half in halves]


def _halves_of_forest(
    batch: TokenMicroBatch,
) -> list[tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]]:
    """Half of the leaves each, with all their ancestors; a segment in both halves is trained in the first.

    In the order of their sequences, which is depth-first, the trained tokens of a sequence all are in one half: losses
    over whole sequences need them together.
    """
    segments = batch.segments_K3
    assert segments is not None
    leaves = np.setdiff1d(np.arange(len(segments)), segments[:, 2])
    leaves = leaves[np.argsort(batch.sequences_RT[0, segments[leaves, 0]])]
    sizes = np.cumsum(segments[leaves, 1] - segments[leaves, 0])
    middle = min(max(1, int(np.searchsorted(sizes, sizes[-1] / 2))), len(leaves) - 1)
    halves: list[tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]] = []
    seen: set[int] = set()
    for part in (leaves[:middle], leaves[middle:]) if middle else (leaves,):
        chosen = {-1}
        for leaf in part.tolist():
            while leaf not in chosen:
                chosen.add(leaf)
                leaf = int(segments[leaf, 2])
        order = sorted(chosen - {-1})
        place = {number: at for at, number in enumerate(order)} | {-1: -1}
        columns = np.concatenate([np.arange(*segments[number, :2]) for number in order])
        mask = batch.loss_mask_RT[:, columns].copy()
        own = np.empty((len(order), 3), np.int64)
        start = 0
        for at, number in enumerate(order):
            end = start + int(segments[number, 1] - segments[number, 0])
            own[at] = start, end, place[int(segments[number, 2])]
            if number in seen:
                mask[:, start:end] = 0
            start = end
        seen |= chosen
        halves.append(((np.array([0]), columns), own, mask))
    return halves


class _Places:
    """The arrays of a micro-batch, side by side in one block of memory. Their content is undefined until written."""

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

    def put(
        self, row: int, at: int, sample: Sample, sequence: TokenSequence, low: int, high: int, *, number: int
    ) -> None:
        """Writes tokens `low` to `high` of a sequence at column `at`."""
        end = at + high - low
        self.position_ids[row, at:end] = np.arange(low, high)
        self.sequences[row, at:end] = number
        self.loss_mask[row, at:end] = sequence.loss_mask[low:high]
        passed = 0
        for first, last in sequence.stretches:
            start, stop = max(low - passed, 0) + first, min(high - passed, last - first) + first
            passed += last - first
            if start < stop:
                end = at + stop - start
                self.token_ids[row, at:end] = sample["token_ids"][start:stop]
                self.logprobs[row, at:end] = sample["logprobs"][start:stop]
                if self.experts is not None:
                    self.experts[row, at:end] = sample["routed_experts"][start:stop]
                at = end

    def blank(self, row: int, start: int) -> None:
        """Fills the row with padding from token `start` on."""
        for array in (self.token_ids, self.position_ids, self.loss_mask, self.logprobs, self.experts):
            if array is not None:
                array[row, start:] = 0
        self.sequences[row, start:] = -1


def _check_aligned(sample: Sample, sequence: TokenSequence, experts_row: tuple[int, ...] | None) -> None:
    """Raises unless every stream has one entry per token, and the first token is untrained: nothing predicts it."""
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
        f"streams as the other samples and an untrained first token; it has {streams}"
    )
