"""The five hooks of a workload. The runner owns leasing, batching, retries, delivery and shutdown.

    preflight ─▶ prepare (per prompt) ─▶ collate ─▶ generate (per batch) ─▶ postprocess (per prompt)

A lease covers some samples of one prompt, so "per prompt" means "per lease". Contracts:

| hook        | thread               | may block | order                              | when it raises               |
|-------------|----------------------|-----------|------------------------------------|------------------------------|
| preflight   | engine               | yes       | first, before anything is leased   | the worker stops with it     |
| prepare     | preparation          | yes       | lease order, one call per lease    | fails that lease             |
| collate     | engine               | briefly   | just before its generate           | as generate                  |
| generate    | engine, or the loop¹ | yes¹      | lease order; `concurrency` at once | each lease is tried alone    |
| postprocess | postprocessing       | yes       | as generated, one call per lease   | fails that lease             |

¹ `async def generate` runs on the event loop, must not block it, and may have many calls in flight.

Prepare, generate and postprocess of *different* leases run concurrently. `PeerLost`, `RunFailed` and any
`BaseException` that is not an `Exception` are never attributed to a lease: raised in any hook, they end the worker
after its leases are returned. No hook is called for a returned lease; the result of a call already in progress is
dropped.

`postprocess` may return a `concurrent.futures.Future` of the outcomes: the lease then waits for it without blocking a
thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.records.ids import Version
from penstock.records.prompt import PromptLease

Prepared = TypeVar("Prepared")
Collated = TypeVar("Collated")
Generated = TypeVar("Generated")

Arrays = dict[str, Any]
"""numpy arrays by name; a list of them is one array, in chunks along its first axis."""


class Finished(msgspec.Struct):
    """One complete sample."""

    arrays: Arrays
    """Its data, written to the payload ring unchanged."""
    reward: float
    version: Version
    """The oldest weights that generated any part of it."""
    weights_digest: str
    """Digest of those weights, as reported by the engine."""
    length: int
    """Generated tokens, or environment steps."""
    unscored: str = ""
    """Why it has no reward, if so. `reward` is then a placeholder, and the sample has no advantage."""


class Failed(msgspec.Struct):
    """One sample that could not be generated; the others of its lease are not affected."""

    error: str
    poison: bool = False
    """A retry cannot succeed: set the prompt aside at once."""
    hook: str = "postprocess"
    """The hook in which it failed, for the record."""


class Unusable(msgspec.Struct, frozen=True):
    """Returned by `prepare` for a prompt that can never be generated (e.g. too long): it is set aside at once."""

    reason: str


Outcome = Finished | Failed


class Workload(Protocol[Prepared, Collated, Generated]):
    """The hooks that generate samples. The table above has the contract of each."""

    def preflight(self) -> None:
        """Raises (preferably ConfigError) if generation cannot work at all."""
        ...

    def prepare(self, lease: PromptLease) -> Prepared | Unusable:
        """Does all work on a prompt that does not need the engine."""
        ...

    def collate(self, prepared: Sequence[Prepared]) -> Collated:
        """Returns one batch for the engine."""
        ...

    def generate(self, batch: Collated) -> Sequence[Generated] | Awaitable[Sequence[Generated]]:
        """Returns one result per prepared lease, in the same order."""
        ...

    def postprocess(
        self, prepared: Prepared, generated: Generated
    ) -> Sequence[Outcome] | Future[Sequence[Outcome]] | Future[list[Outcome]]:
        """Computes rewards and arrays. Returns one outcome per sample of the lease, in its order."""
        ...


def held_bytes(value: Any) -> int:
    """Size of a prepared or generated value: its `size_bytes` or `nbytes`, or the sum of its parts; 0 if unknown."""
    for attribute in ("size_bytes", "nbytes"):
        size = getattr(value, attribute, None)
        if isinstance(size, int):
            return size
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(held_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(held_bytes(part) for part in value)
    return 0
