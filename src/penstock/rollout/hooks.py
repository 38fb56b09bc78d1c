"""The five hooks: all that a workload has to supply. The runner owns leasing, batching, retries, delivery and shutdown.

    preflight ─▶ prepare (per prompt) ─▶ collate ─▶ generate (per batch) ─▶ postprocess (per prompt)

A lease asks for some samples of one prompt, so "per prompt" means "per lease". Contracts:

| hook        | thread               | may block | order                              | when it raises               |
|-------------|----------------------|-----------|------------------------------------|------------------------------|
| preflight   | engine               | yes       | first, before anything is leased   | the worker stops with it     |
| prepare     | preparation          | yes       | lease order, one call per lease    | costs that lease             |
| collate     | engine               | briefly   | just before its generate           | as generate                  |
| generate    | engine, or the loop¹ | yes¹      | lease order; `concurrency` at once | each lease is tried alone    |
| postprocess | postprocessing       | yes       | as generated, one call per lease   | costs that lease             |

¹ `async def generate` runs on the event loop, must not block it, and may have many calls in flight.

Prepare, generate and postprocess of *different* leases run at the same time. `PeerLost` and `RunFailed` (and what
is not an `Exception`) are never a lease's fault: raised in any hook they end the worker, after its leases were given
back. A hook is never called again for a lease that was given back, but one call already under way may still end;
its result is dropped.

`postprocess` may return a `concurrent.futures.Future` of the outcomes: the lease then waits beside the others, and no
thread waits with it.
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
    """One sample as it should have come out."""

    arrays: Arrays
    """The bulk, written to the payload ring as it is."""
    reward: float
    version: Version
    """The oldest weights any part of it was drawn with."""
    weights_digest: str
    """What the engine said it was serving then."""
    length: int
    """Generated tokens, or environment steps."""
    unscored: str = ""
    """Why it has no reward of its own, if so. `reward` is then a stand-in, and the sample has no advantage."""


class Failed(msgspec.Struct):
    """One sample that could not be made; the others of its lease are not affected."""

    error: str
    poison: bool = False
    """Retrying cannot help: set the prompt aside at once."""


class Unusable(msgspec.Struct, frozen=True):
    """Returned by `prepare` for a prompt that can never be generated (over-long, say): it is set aside at once."""

    reason: str


Outcome = Finished | Failed


class Workload(Protocol[Prepared, Collated, Generated]):
    """What to generate and how. See the table above for what each hook may do."""

    def preflight(self) -> None:
        """Raises (ConfigError, preferably) if generation cannot work at all."""
        ...

    def prepare(self, lease: PromptLease) -> Prepared | Unusable:
        """Everything that can be done for a prompt before it meets the engine."""
        ...

    def collate(self, prepared: Sequence[Prepared]) -> Collated:
        """One batch for the engine."""
        ...

    def generate(self, batch: Collated) -> Sequence[Generated] | Awaitable[Sequence[Generated]]:
        """One result per prepared lease, in their order."""
        ...

    def postprocess(
        self, prepared: Prepared, generated: Generated
    ) -> Sequence[Outcome] | Future[Sequence[Outcome]] | Future[list[Outcome]]:
        """One outcome per sample of the lease, in its order: score, and lay out the arrays."""
        ...


def held_bytes(value: Any) -> int:
    """What a prepared or generated value holds, as far as it says: `size_bytes`, `nbytes`, or the sum of its parts."""
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
