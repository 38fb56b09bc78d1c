"""What a preparation pool makes of processes that die or hang."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from penstock.errors import PeerLost
from penstock.rollout.io.preparation_pool import PreparationPool

HANGS = object()


class ScriptedPool:
    """Ends every call with one outcome, or not at all."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def submit(self, *call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        elif self.outcome is not HANGS:
            future.set_result(self.outcome)
        return future

    def shutdown(self, **options: Any) -> None:
        pass


def pool_of(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> PreparationPool:
    pools = iter([ScriptedPool(outcome) for outcome in outcomes])
    monkeypatch.setattr(PreparationPool, "_started", lambda self: next(pools))
    return PreparationPool(1, timeout_s=0.01)


def test_a_call_is_made_once_more_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_of(monkeypatch, BrokenProcessPool("killed"), "made").run(len, "x") == "made"


@pytest.mark.parametrize("before", [(), (BrokenProcessPool("killed"),)], ids=["at once", "after a death"])
def test_a_process_that_hangs_ends_the_worker(monkeypatch: pytest.MonkeyPatch, before: tuple[Exception, ...]) -> None:
    with pytest.raises(PeerLost, match="did not answer within"):
        pool_of(monkeypatch, *before, HANGS).run(len, "x")


def test_a_function_may_run_out_of_time_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match="no such host"):
        pool_of(monkeypatch, TimeoutError("no such host")).run(len, "x")


def test_a_call_that_kills_twice_is_at_fault_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokenProcessPool):
        pool_of(monkeypatch, BrokenProcessPool("killed"), BrokenProcessPool("killed again")).run(len, "x")
