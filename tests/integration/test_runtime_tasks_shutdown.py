"""Tasks, offloaded work and shutdown: first failures are named, every end is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from penstock.errors import LocalProtocolError, RunFailed, Stale
from penstock.runtime.offload import Offload
from penstock.runtime.shutdown import ShutdownSignal, teardown
from penstock.runtime.tasks import Tasks


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def fail(error: Exception) -> None:
    raise error


async def test_the_first_failure_cancels_the_rest_and_is_named() -> None:
    ended: list[str] = []

    async def body() -> None:
        async with Tasks() as tasks:
            tasks.spawn("one", forever(ended, "one"))
            tasks.spawn("two", forever(ended, "two"))
            await asyncio.sleep(0)
            tasks.spawn("arithmetic", fail(ZeroDivisionError("by zero")))

    with pytest.raises(RunFailed, match="task 'arithmetic' failed: ZeroDivisionError: by zero") as caught:
        await body()
    assert sorted(ended) == ["one", "two"]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_our_own_errors_keep_their_class() -> None:
    with pytest.raises(Stale, match="gone") as caught:
        async with Tasks() as tasks:
            tasks.spawn("fetch", fail(Stale("gone")))
    assert caught.value.__notes__ == ["in task 'fetch'"]


async def nested(error: Exception) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(error))


async def test_groups_of_nested_scopes_are_opened() -> None:
    with pytest.raises(Stale, match="deep down"):
        async with Tasks() as tasks:
            tasks.spawn("outer", nested(Stale("deep down")))

    async def body() -> None:
        async with Tasks():
            await nested(Stale("deep in the body"))

    with pytest.raises(Stale, match="deep in the body"):
        await body()


async def test_errors_after_the_first_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_while_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Stale("second") from None

    async def body() -> None:
        async with Tasks() as tasks:
            tasks.spawn("later", fail_while_cancelled())
            await asyncio.sleep(0)
            tasks.spawn("earlier", fail(Stale("first")))

    with pytest.raises(Stale, match="first"):
        await body()
    assert "task 'later' also failed, after 'earlier': second" in caplog.text


async def test_a_failing_body_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def body() -> None:
        async with Tasks() as tasks:
            tasks.spawn("one", forever(ended, "one"))
            await asyncio.sleep(0)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await body()
    assert ended == ["one"]


async def test_cancelling_all_ends_without_an_error() -> None:
    ended: list[str] = []
    async with Tasks() as tasks:
        tasks.spawn("one", forever(ended, "one"))
        await asyncio.sleep(0)
        assert tasks.running == ["one"]
        tasks.cancel()
    assert ended == ["one"]
    assert tasks.running == []


async def test_being_cancelled_from_outside_cancels_the_tasks() -> None:
    ended: list[str] = []

    async def scope() -> None:
        async with Tasks() as tasks:
            tasks.spawn("one", forever(ended, "one"))

    outer = asyncio.ensure_future(scope())
    while not outer.done() and not ended:
        await asyncio.sleep(0)
        outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert ended == ["one"]


# -- offload ------------------------------------------------------------------------------------------------------


async def test_work_runs_in_named_threads_and_errors_come_back() -> None:
    offload = Offload(2, "packing")
    assert (await offload.run(lambda: threading.current_thread().name)).startswith("packing-")
    assert await offload.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 1, 0)
    assert offload.close(10)
    with pytest.raises(LocalProtocolError, match="closed"):
        offload.submit(divmod, 1, 1)


def test_closing_is_bounded_though_a_call_is_wedged() -> None:
    release, begun = threading.Event(), threading.Event()

    def wedged() -> None:
        begun.set()
        release.wait(60)

    offload = Offload(1, "wedged")
    running = offload.submit(wedged)
    queued = offload.submit(divmod, 1, 1)
    assert begun.wait(20)
    assert not offload.close(0.05)
    assert queued.cancelled()
    release.set()
    assert running.result(20) is None


def test_a_wedged_thread_does_not_hold_the_process() -> None:
    program = """
        import time
        from penstock.runtime.offload import Offload
        Offload(1, "wedged").submit(time.sleep, 600)
        print("done", flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=30, check=True
    )
    assert ended.stdout == b"done\n"


# -- shutdown -----------------------------------------------------------------------------------------------------


async def test_a_signal_wakes_those_who_wait() -> None:
    shutdown = ShutdownSignal()
    shutdown.install()
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            waiting = [group.create_task(shutdown.wait()) for _ in range(3)]
            await asyncio.sleep(0)
            assert not shutdown.requested
            os.kill(os.getpid(), signal.SIGTERM)
        assert [task.result() for task in waiting] == ["received SIGTERM"] * 3
        assert await shutdown.wait() == "received SIGTERM"
        shutdown.request("too late")
        assert shutdown.reason == "received SIGTERM"
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


def test_a_second_signal_insists_unless_it_is_the_first_in_another_guise(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = ShutdownSignal()
    monkeypatch.setattr("penstock.runtime.shutdown.INSIST_AFTER_S", 1000.0)
    shutdown._signalled("received SIGINT")
    shutdown._signalled("received SIGINT")
    shutdown.request("something else")
    assert shutdown.requested
    assert not shutdown.insisted.is_set()
    monkeypatch.setattr("penstock.runtime.shutdown.INSIST_AFTER_S", 0.0)
    shutdown._signalled("received SIGTERM")
    assert shutdown.insisted.is_set()
    assert shutdown.reason == "received SIGINT"


async def test_a_request_from_another_thread_wakes_those_who_wait() -> None:
    shutdown = ShutdownSignal()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(shutdown.wait())
        await asyncio.sleep(0)
        await asyncio.to_thread(shutdown.request, "asked elsewhere")
    assert waiting.result() == "asked elsewhere"


async def test_teardown_goes_on_past_steps_that_fail_or_hang(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def good(name: str) -> None:
        done.append(name)

    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(60):
            outcomes = await teardown(
                [
                    ("unregister", lambda: good("unregister")),
                    ("join", lambda: asyncio.Event().wait()),
                    ("flush", lambda: fail(OSError("no disk"))),
                    ("tell", lambda: fail(TimeoutError("no answer"))),
                    ("close", lambda: good("close")),
                ],
                deadline_s=0.2,
            )
    assert done == ["unregister", "close"]
    assert [(outcome.name, outcome.problem) for outcome in outcomes] == [
        ("unregister", ""),
        ("join", "not done after 0.2 s, abandoned"),
        ("flush", "OSError: no disk"),
        ("tell", "TimeoutError: no answer"),
        ("close", ""),
    ]
    assert "teardown 2/5 join: not done" in caplog.text
    assert "teardown 5/5 close: done" in caplog.text
