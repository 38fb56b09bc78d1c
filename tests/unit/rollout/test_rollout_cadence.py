"""The cadence of one rank: a lease that failed while its batch was held ahead."""

from __future__ import annotations

import pytest

from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout import flow
from penstock.rollout.cadence import AwaitPrepared, BatchPrepared, Cadence, CommandReceived, Drop, ResultsSent


def leases(*prompts: int) -> tuple[PromptLease, ...]:
    return tuple(PromptLease(PromptIndex(one), 0, (SampleId(one),), (0,), Version(0)) for one in prompts)


@pytest.fixture
def ahead() -> Cadence:
    """It holds a batch of two leases ahead; the first failed in its preparation and is reported already."""
    cadence = Cadence(rank=0, ranks=1, share=True)
    cadence.handle(CommandReceived("work", leases(0, 1), True), 0.0)
    cadence.handle(flow.PrepareEnded(flow.Ticket(0), failed=True), 0.0)
    cadence.handle(flow.PrepareEnded(flow.Ticket(1)), 0.0)
    cadence.handle(ResultsSent(), 0.0)
    assert 0 not in cadence.held
    return cadence


def test_the_rest_of_its_batch_is_generated(ahead: Cadence) -> None:
    *_, due = ahead.handle(CommandReceived("work", leases(2), True), 0.0)
    assert isinstance(due, AwaitPrepared)
    [generate] = ahead.handle(BatchPrepared(due.batch), 0.0)
    assert isinstance(generate, flow.Generate)
    assert generate.tickets == (1,)
    ahead.check()


def test_the_rest_of_its_batch_is_dropped(ahead: Cadence) -> None:
    dropped, *_ = ahead.handle(CommandReceived("pause", (), True), 0.0)
    assert isinstance(dropped, Drop)
    assert dropped.tickets == (1,)
    ahead.check()
