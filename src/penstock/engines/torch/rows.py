"""Decodes many requests together, one token each per step; each may join before any step and leave after any.

A row holds all its tokens and the number of them that are cached. A step first *decodes*: each prefilled row feeds its
last token. Then it *reads* (prefills): the other rows, new ones or all of them after the cache was dropped, feed their
tokens, once for rows with the same context, and draw their first token. On a GPU a step is launched before the results
of the step before it are read: a token that an ended row drew in it is discarded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.decoding import Decoding, Output
from penstock.engines.torch.sampling import Kind, kind_of

READ_TOKENS = 8192
"""Most tokens that one forward prefills, padding included, so that a long context does not delay the decoding rows."""
READ_COSTS_STEPS = {"cuda": 3}
"""Cost of a short prefill in decode steps: it is delayed until the waiting rows have missed as many. On a CPU: 1."""


class Owner(Protocol):
    """The part of the engine that its rows use."""

    @property
    def device(self) -> torch.device: ...

    @property
    def generator(self) -> torch.Generator: ...

    @property
    def version(self) -> int: ...

    def completion(
        self, token_ids: np.ndarray, logprobs: np.ndarray, spans: Sequence[tuple[int, int, str]], ending: Ending
    ) -> Completion: ...


class Row(msgspec.Struct, eq=False):
    """One request in flight."""

    request: int
    tokens: list[int]
    """Context and generated tokens."""
    context_tokens: int
    sampling: Sampling
    key: Hashable | None = None
    """The conversation, if its cache is to be kept."""
    place: int = -1
    """Its index in the cache."""
    cached: int = 0
    """Tokens in the cache, from the first on."""
    entered: bool = False
    """Whether its context is prefilled and its last token is on the device: it decodes."""
    launched: int = 0
    """Tokens in launches whose output is not yet read."""
    logprobs: list[float] = []
    spans: list[tuple[int, int, str]] = []
    """The first generated token of each span, with the version and digest of its weights."""
    ending: Ending | None = None

    @property
    def unread(self) -> int:
        return len(self.tokens) + self.launched - self.cached

    @property
    def needs_more(self) -> bool:
        """Whether another token is to be drawn, according to the outputs read so far."""
        return self.ending is None and len(self.logprobs) + self.launched < self.sampling.max_new_tokens

    def drew(self, token: int, logprob: float, version: int, digest: str) -> None:
        if not self.spans or self.spans[-1][1:] != (version, digest):
            self.spans.append((len(self.logprobs), version, digest))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop_ids:
            self.ending = "stop"
        elif len(self.logprobs) >= self.sampling.max_new_tokens:
            self.ending = "length"


class SavedCache(msgspec.Struct, eq=False):
    """The cache of a conversation for its next turn."""

    tokens: list[int]
    columns: Tensor
    version: int


class _Launch(msgspec.Struct, eq=False):
    """Draws whose output is not yet read."""

    rows: list[Row]
    places: list[int] | None
    """The place of each row at the launch; None: in this order."""
    output: Output
    version: int
    digest: str


class Rows:
    """The rows of one engine. All accesses to the cache are inside a step of `engine.serving`."""

    def __init__(self, engine: Owner, cache: RowCache, decoding: Decoding, *, reread: bool) -> None:
        self._engine = engine
        self._cache = cache
        self._decoding = decoding
        self._reread = reread
        self._version: int | None = None
        self._launches: deque[_Launch] = deque()
        self._free: list[int] = []
        """Places below `_used` without a row."""
        self._used = 0
        self._unread_steps = 0
        self._kind = Kind(drawn=True, greedy=False, cut=False)
        self.rows: list[Row] = []
        self.read_tokens = 0
        """Prefilled tokens since the start."""

    def make_room(self, rows: int, longest_tokens: int) -> None:
        """Allocates the cache for a number of rows, none of which becomes longer than this."""
        if self._free and not self._cache.holds(self._used, longest_tokens):
            self._compact()  # free places between the rows would leave too few columns
        if self._cache.make_room(max(rows, self._used), longest_tokens, used_rows=self._used):
            self._decoding.allocate()

    def seat(self, row: Row, saved: SavedCache | None) -> None:
        """Assigns a place to a new row, and loads the common prefix of its conversation's cache."""
        row.place = heapq.heappop(self._free) if self._free else self._used
        self._used = max(self._used, row.place + 1)
        self._decoding.park(row.place)
        if saved is not None and not (self._reread and saved.version != self._engine.version):
            row.cached = _common_prefix(saved.tokens, row.tokens[:-1])
            self._cache.load(row.place, saved.columns[:, :, : row.cached])
        self.rows.append(row)
        self._kind = kind_of([row.sampling for row in self.rows])

    def save(self, row: Row) -> SavedCache:
        """A copy of a row's cache, for the conversation's next turn."""
        tokens = row.tokens[: row.cached]
        return SavedCache(tokens, self._cache.save(row.place, len(tokens)), self._engine.version)

    def leave(self, row: Row) -> None:
        """Frees the row's place."""
        self.rows.remove(row)
        row.ending = row.ending or "interrupted"
        heapq.heappush(self._free, row.place)
        if not self.rows:
            self._launches.clear()
            self._free, self._used = [], 0
        elif self._worth_compacting(self._used, len(self.rows)):
            self._compact()

    def clear(self) -> None:
        """All rows leave."""
        self.rows.clear()
        self._launches.clear()
        self._free, self._used = [], 0

    def drop_cache(self) -> None:
        """Frees the device memory; rows keep their tokens, and prefill them again after `make_room`."""
        self._cache.drop()
        self._decoding.drop()
        for row in self.rows:
            row.cached, row.entered = 0, False

    def step(self, version: int, digest: str) -> list[Row]:
        """Draws one token for every prefilled row; returns the rows that ended."""
        if self._reread and version != self._version:
            self._decoding.park_all()
            for row in self.rows:
                row.cached, row.entered = 0, False
        self._version = version
        ended: list[Row] = []
        if any(row.launched and not row.entered for row in self.rows):
            ended += self._read_outputs(0)  # their last tokens must be on the host before they can be prefilled
        before = len(self._launches)
        decoding = [row for row in self.rows if row.entered and row.needs_more]
        if decoding:
            self._decode(decoding, version, digest)
        # After the decode: rows prefilled here decode from the next step on.
        self._read(bool(decoding), version, digest)
        ahead = len(self._launches) - before if self._engine.device.type == "cuda" else 0
        return ended + self._read_outputs(ahead)

    def _decode(self, decoding: list[Row], version: int, digest: str) -> None:
        batch = self._batch(self._used)
        columns = max(row.cached for row in decoding) + 1
        output = self._decoding.step(batch, columns, self._kind, self._engine.generator)
        for row in decoding:
            row.cached += 1
            row.launched += 1
        self._launches.append(_Launch(decoding, [row.place for row in decoding], output, version, digest))

    def _read_outputs(self, left: int) -> list[Row]:
        """Reads the outputs of all but the `left` newest launches; returns the rows that ended."""
        ended: list[Row] = []
        while len(self._launches) > left:
            launch = self._launches.popleft()
            tokens, logprobs = launch.output.read()
            for index, row in enumerate(launch.rows):
                row.launched -= 1
                if row.ending is not None:
                    continue
                place = index if launch.places is None else launch.places[index]
                row.drew(tokens[place], logprobs[place], launch.version, launch.digest)
                if row.ending is not None:
                    ended.append(row)
        return ended

    def _read(self, decoding: bool, version: int, digest: str) -> None:
        """Prefills contexts, up to `READ_TOKENS`, and draws the first token of each complete one."""
        unread = [row for row in self.rows if not row.entered and row.needs_more]
        if not unread:
            return
        self._unread_steps += len(unread)
        costs_steps = READ_COSTS_STEPS.get(self._engine.device.type, 1)
        if decoding and self._unread_steps < costs_steps * len(self.rows):
            return
        self._unread_steps = 0
        shared: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
        for row in unread:
            shared.setdefault((row.cached, tuple(row.tokens)), []).append(row)
        chosen: list[list[Row]] = []
        counts: list[int] = []
        for group in shared.values():
            count = min(group[0].unread, READ_TOKENS)
            if chosen and (len(chosen) + 1) * max(count, *counts) > READ_TOKENS:
                break
            chosen.append(group)
            counts.append(count)
        logits_BV = self._forward([group[0] for group in chosen], counts)
        self.read_tokens += sum(counts)
        drawing: list[Row] = []
        sources: list[int] = []
        for source, (first, *others) in enumerate(chosen):
            self._cache.copy(first.place, [row.place for row in others], first.cached)
            for row in others:
                row.cached = first.cached
            if first.unread == 0:
                drawing += [first, *others]
                sources += [source] * (1 + len(others))
        if not drawing:
            return  # a long context is prefilled in parts
        if len(sources) != len(logits_BV):
            logits_BV = logits_BV[torch.tensor(sources).to(logits_BV.device)]
        output = self._decoding.enter(
            [row.place for row in drawing],
            [row.cached for row in drawing],
            [row.sampling for row in drawing],
            kind_of([row.sampling for row in drawing]),
            logits_BV,
            self._engine.generator,
        )
        for row in drawing:
            row.launched += 1
            row.entered = True
        self._launches.append(_Launch(drawing, None, output, version, digest))

    def _forward(self, rows: list[Row], counts: Sequence[int]) -> Tensor:
        """Prefills the next `counts` tokens of these rows; returns the logits after the last of each."""
        width = max(counts)
        ids_BQ = np.zeros((len(rows), width), dtype=np.int64)
        positions_BQ = np.full((len(rows), width), -1, dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ids_BQ[index, width - count :] = row.tokens[row.cached : row.cached + count]
            positions_BQ[index, width - count :] = np.arange(row.cached, row.cached + count)
            row.cached += count
        return self._decoding.read([row.place for row in rows], ids_BQ, positions_BQ, max(row.cached for row in rows))

    def _batch(self, rows: int) -> int:
        """Places that a step decodes: few different numbers on a GPU, since each is captured."""
        if self._engine.device.type != "cuda":
            return rows
        return min(1 << (rows - 1).bit_length(), self._cache.shape[0])

    def _worth_compacting(self, used: int, rows: int) -> bool:
        if self._engine.device.type == "cuda":
            return self._batch(rows) < self._batch(used)
        return 4 * (used - rows) >= used

    def _compact(self) -> None:
        """Moves the last rows into free places, so that a step decodes fewer places."""
        allocated = bool(self._cache.shape[0])
        for row in sorted(self.rows, key=lambda row: -row.place):
            if self._free[0] > row.place:
                break
            source, row.place = row.place, heapq.heappop(self._free)
            if allocated:  # a dropped cache has no content to move
                self._cache.copy(source, [row.place], row.cached)
                self._decoding.move(source, row.place)
            heapq.heappush(self._free, source)
        self._used = len(self.rows)
        self._free = []

    def completion(self, row: Row) -> Completion:
        """The completion of a row, also of one that has not ended."""
        token_ids = np.array(row.tokens[row.context_tokens :], dtype=np.int32)
        logprobs = np.array(row.logprobs, dtype=np.float32)
        return self._engine.completion(token_ids, logprobs, row.spans, row.ending or "interrupted")


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))
