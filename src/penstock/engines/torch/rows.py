"""Decodes many requests together, one token each per step; each may join before any step and leave after any.

A row knows all its tokens and how many of them are in the cache. A step first *reads*: rows with more than one token
outside the cache (new ones, all of them after the cache was dropped) bring theirs in, those with the same context
together. Then it *decodes*: every other row feeds its last token. Whoever has all its tokens in then draws the next.

Shape suffixes: B rows of a forward, Q tokens it reads, C columns of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.torch.cache import RowCache
from penstock.engines.torch.static import SamplingEngine

READ_TOKENS = 8192
"""Read by one forward at most, padding included, so that a long context does not hold up the rows that decode."""
COLUMNS_TOGETHER = 16
"""The cache is read in widths of this, which attention kernels like."""


class Row(msgspec.Struct, eq=False):
    """One request on its way."""

    request: int
    tokens: list[int]
    """Context and what was generated after it."""
    context_tokens: int
    sampling: Sampling
    key: Hashable | None = None
    """The conversation, if its cache is worth keeping."""
    cached: int = 0
    """Tokens in the cache, from the first on."""
    logprobs: list[float] = []
    spans: list[tuple[int, int, str]] = []
    """From which generated token on, which version and digest."""
    ending: Ending | None = None

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.cached

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
    """What a conversation's next turn need not read again."""

    tokens: list[int]
    columns: Tensor
    version: int


class Rows:
    """The rows of one engine. Everything that touches the cache happens inside a step of `engine.serving`."""

    def __init__(self, engine: SamplingEngine, rows: int, cache_tokens: int, *, reread: bool) -> None:
        self._engine = engine
        self._cache = RowCache(engine.model, rows, cache_tokens)
        self._reread = reread
        self._version: int | None = None
        self._mask_dtype = next(engine.model.parameters()).dtype
        self.rows: list[Row] = []
        """By their place in the cache."""
        self.read_tokens = 0
        """Read into the cache so far, beside those that were drawn."""

    def make_room(self, rows: int, longest_tokens: int) -> None:
        """For so many rows, none of which will become longer than this."""
        self._cache.make_room(rows, longest_tokens, used_rows=len(self.rows))

    def seat(self, row: Row, saved: SavedCache | None) -> None:
        """A place for a new row, with what is left of its conversation's cache."""
        if saved is not None and not (self._reread and saved.version != self._engine.version):
            row.cached = _common(saved.tokens, row.tokens[:-1])
            self._cache.load(len(self.rows), saved.columns[:, :, : row.cached])
        self.rows.append(row)

    def save(self, row: Row) -> SavedCache:
        """A copy of a row's cache, to be given to the conversation's next turn."""
        columns = self._cache.save(self.rows.index(row), row.cached)
        return SavedCache(row.tokens[: row.cached], columns, self._engine.version)

    def leave(self, row: Row) -> None:
        """Frees the row's place; the last row moves there."""
        place = self.rows.index(row)
        last = self.rows.pop()
        if last is not row:
            self._cache.copy(len(self.rows), [place], last.cached)
            self.rows[place] = last

    def drop_cache(self) -> None:
        """Frees the device memory; rows keep their tokens and, once there is room again, read them again."""
        self._cache.drop()
        for row in self.rows:
            row.cached = 0

    def step(self, version: int, digest: str) -> list[Row]:
        """One token for every row that has read its context; returns the rows that ended."""
        if self._reread and version != self._version:
            for row in self.rows:
                row.cached = 0
        self._version = version
        # Taken now: a row that is about to read its context does not decode in the same step.
        decoding = [place for place, row in enumerate(self.rows) if row.unread == 1]
        drawing, logits = self._read()
        if decoding:
            drawing += decoding
            logits.append(self._forward(decoding, [1] * len(decoding)))
        if not drawing:
            return []  # a long context is being read in parts
        tokens, logprobs = self._draw(drawing, torch.cat(logits) if len(logits) > 1 else logits[0])
        for place, token, logprob in zip(drawing, tokens, logprobs, strict=True):
            self.rows[place].drew(token, logprob, version, digest)
        return [row for row in self.rows if row.ending is not None]

    def _read(self) -> tuple[list[int], list[Tensor]]:
        """Reads contexts, some of them if they are many; the rows that may draw now, and their logits."""
        shared: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for place, row in enumerate(self.rows):
            if row.unread > 1:
                shared.setdefault((row.cached, tuple(row.tokens)), []).append(place)
        chosen: list[list[int]] = []
        counts: list[int] = []
        for places in shared.values():
            count = min(self.rows[places[0]].unread, READ_TOKENS)
            if chosen and (len(chosen) + 1) * max(count, *counts) > READ_TOKENS:
                break
            chosen.append(places)
            counts.append(count)
        if not chosen:
            return [], []
        logits_BV = self._forward([places[0] for places in chosen], counts)
        self.read_tokens += sum(counts)
        drawing: list[int] = []
        sources: list[int] = []
        for source, (first, *others) in enumerate(chosen):
            read = self.rows[first].cached
            self._cache.copy(first, others, read)
            for place in others:
                self.rows[place].cached = read
            if self.rows[first].unread == 0:
                drawing += [first, *others]
                sources += [source] * (1 + len(others))
        if len(sources) == len(logits_BV):
            return drawing, [logits_BV]
        return drawing, [logits_BV[torch.tensor(sources, device=logits_BV.device)]] if sources else []

    def _forward(self, places: list[int], counts: Sequence[int]) -> Tensor:
        """The next `counts` tokens of these rows through the model; the logits after the last of each."""
        rows = [self.rows[place] for place in places]
        width = max(counts)
        ids_BQ = np.zeros((len(rows), width), dtype=np.int64)
        positions_BQ = np.full((len(rows), width), -1, dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ids_BQ[index, width - count :] = row.tokens[row.cached : row.cached + count]
            positions_BQ[index, width - count :] = np.arange(row.cached, row.cached + count)
            row.cached += count
        columns = -(-max(row.cached for row in rows) // COLUMNS_TOGETHER) * COLUMNS_TOGETHER
        columns = min(columns, self._cache.shape[1])
        device = self._engine.device
        positions = torch.from_numpy(positions_BQ).to(device)
        self._cache.aim(places, positions, columns)
        position_ids = positions.clamp(min=0)
        # Padding sees column 0, since a softmax over nothing is not a number.
        seen = torch.arange(columns, device=device) <= position_ids[:, None, :, None]
        mask_B1QC = torch.zeros(seen.shape, dtype=self._mask_dtype, device=device)
        mask_B1QC.masked_fill_(~seen, torch.finfo(self._mask_dtype).min)
        output = self._engine.model(
            input_ids=torch.from_numpy(ids_BQ).to(device),
            attention_mask=mask_B1QC,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _draw(self, places: list[int], logits_BV: Tensor) -> tuple[list[int], list[float]]:
        """Rows that are sampled alike are sampled together; nearly always that is all of them."""
        alike: dict[Sampling, list[int]] = {}
        for index, place in enumerate(places):
            sampling = msgspec.structs.replace(self.rows[place].sampling, max_new_tokens=0, stop_ids=())
            alike.setdefault(sampling, []).append(index)
        if len(alike) == 1:
            tokens_B1, logprobs_B1 = self._engine.sample(logits_BV, next(iter(alike)))
        else:
            tokens_B1 = torch.empty((len(places), 1), dtype=torch.long, device=logits_BV.device)
            logprobs_B1 = torch.empty((len(places), 1), device=logits_BV.device)
            for sampling, members in alike.items():
                index = torch.tensor(members, device=logits_BV.device)
                tokens_B1[index], logprobs_B1[index] = self._engine.sample(logits_BV[index], sampling)
        return tokens_B1[:, 0].tolist(), logprobs_B1[:, 0].tolist()

    def completion(self, row: Row) -> Completion:
        """A row as it is given out, also one that has not ended."""
        token_ids = np.array(row.tokens[row.context_tokens :], dtype=np.int32)
        logprobs = np.array(row.logprobs, dtype=np.float32)
        return self._engine.completion(token_ids, logprobs, row.spans, row.ending or "interrupted")


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))
