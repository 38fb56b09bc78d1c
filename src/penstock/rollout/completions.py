"""Joins the pieces of a completion, and cuts a completion at a stop string."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from penstock.engines.requests import Completion


def joined(before: Completion | None, after: Completion) -> Completion:
    """Joins two consecutive pieces of one completion."""
    if before is None:
        return after
    spans = before.versions.tolist()
    for start, version in after.versions.tolist():
        if not spans or spans[-1][1] != version:
            spans.append([len(before.token_ids) + start, version])
    older = before if before.version <= after.version else after
    return Completion(
        token_ids=np.concatenate([before.token_ids, after.token_ids]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        versions=np.array(spans, np.int32).reshape(-1, 2),
        ending=after.ending,
        version=older.version,
        digest=older.digest,
    )


def cut_at(
    decode: Callable[[Sequence[int]], str],
    stop_strings: Sequence[str],
    drawn: Completion,
    before: Sequence[int] = (),
) -> Completion:
    """The completion up to the token that completes a stop string, if it contains one. `before`: tokens of the same
    completion that were drawn earlier."""
    if not stop_strings or not len(drawn.token_ids):
        return drawn
    ids = [*before, *drawn.token_ids.tolist()]

    def stopped(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stop_strings)

    if not stopped(len(ids)):
        return drawn
    count = max(bisect.bisect_left(range(1, len(ids) + 1), True, key=stopped) + 1 - len(before), 1)
    spans = drawn.versions[drawn.versions[:, 0] < count]
    return msgspec.structs.replace(
        drawn, token_ids=drawn.token_ids[:count], logprobs=drawn.logprobs[:count], versions=spans, ending="stop"
    )
