"""Reports of used payloads: a producer that does not answer delays no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from penstock.payload.io import consumption as module
from penstock.payload.io.consumption import Consumption
from penstock.payload.io.wire_client import WireClient
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress

DEAD, LIVE = (RingAddress(ring=ring, epoch=1, host_id="there", host="there") for ring in ("dead", "live"))


def refs(address: RingAddress, number: int) -> list[PayloadRef]:
    return [PayloadRef(address.ring, 1, number, 1, 10, 0)]


class Producers:
    """Counts the calls. The first one waits until the test lets it end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: list[tuple[str, int]] = []
        self.answers = {"live"}
        self.first = threading.Event()

    def consume(self, address: RingAddress, refs: Sequence[PayloadRef], *_: Any) -> Failure | None:
        with self.changed:
            self.calls.append((address.ring, refs[0].slot))
            self.changed.notify_all()
        assert self.first.wait(30)
        return None if address.ring in self.answers else Failure("timed_out", "no answer")

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30), self.calls


class Bench:
    def __init__(self) -> None:
        self.producers = Producers()
        self.consumption = Consumption()

    def add(self, address: RingAddress, number: int) -> None:
        self.consumption.add(cast(WireClient, self.producers), address, refs(address, number))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.producers.first.set()
    bench.consumption.close(5.0)
    assert "0 payloads not confirmed" in repr(bench.consumption)


def test_a_producer_that_does_not_answer_delays_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    calls = bench.producers.calls
    for number in range(3):
        bench.add(DEAD, number)
    bench.producers.until(lambda: bool(calls))
    bench.add(LIVE, 0)
    bench.producers.first.set()
    bench.producers.until(lambda: ("live", 0) in calls)
    assert calls[: calls.index(("live", 0))] == [("dead", 0)] * 2, "its other reports are postponed, too"
    bench.producers.until(lambda: calls.count(("dead", 0)) > 2)
    bench.add(LIVE, 1)
    bench.producers.until(lambda: ("live", 1) in calls)
    assert ("dead", 1) not in calls
    bench.producers.answers.add("dead")
    bench.producers.until(lambda: {("dead", 1), ("dead", 2)} <= {*calls})
    assert calls.count(("live", 0)) == calls.count(("live", 1)) == 1


def test_closing_does_not_wait_for_the_end_of_a_pause(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 5.0)
    calls = bench.producers.calls
    bench.producers.first.set()
    bench.add(DEAD, 0)
    bench.producers.until(lambda: len(calls) == 2)
    bench.producers.answers.add("dead")
    bench.consumption.close(5.0)
    assert calls == [("dead", 0)] * 3


def test_reports_of_a_dead_producer_are_abandoned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "CONFIRM_TIMEOUT_S", 0.05)
    bench.producers.first.set()
    for number in range(2):
        bench.add(DEAD, number)
    bench.producers.until(lambda: bool(bench.producers.calls))
    bench.consumption.close(5.0)
    assert caplog.text.count("the producer did not confirm it") == 2
