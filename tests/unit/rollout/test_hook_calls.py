"""Calling the hooks for leases that may be gone by then."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from penstock.rollout import flow
from penstock.rollout.io.hook_calls import HookCalls


class Untouched:
    """A workload whose hooks may not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def test_a_batch_that_was_given_back_before_its_turn_ends_without_a_hook():
    """A worker put to sleep just then: its hooks were called with nothing, and complained."""
    posted: list[Any] = []
    calls = HookCalls(
        cast(Any, Untouched()),
        cast(Any, Untouched()),
        works={},
        post=lambda *events: posted.extend(events),
        count=lambda name, value: None,
        record=lambda event: None,
        progressed=lambda doing: None,
    )
    calls.generate(7, [flow.Ticket(1), flow.Ticket(2)])
    asyncio.run(calls.generate_awaiting(8, [flow.Ticket(3)]))
    assert posted == [flow.GenerateEnded(7, failed=True), flow.GenerateEnded(8, failed=True)]
