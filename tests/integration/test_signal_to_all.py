"""A signal reaches all processes at once, as when a system shuts down: the last step is saved nevertheless."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from running import letters, start, trained_steps

from penstock.errors import PeerLost
from penstock.roles import reporting
from penstock.roles.controller import STAY_SHARE, until_stopped
from penstock.runtime.shutdown import ShutdownSignal
from penstock.sim.loop import virtual_loop

GRACE_S = 10.0
SLOW_LOSS = """\
import time


def slow(tokens, settings):
    time.sleep(1.0)
    return -tokens.advantage_M * tokens.current_M, {}
"""


async def controller(event: str, at_s: float) -> float:
    """Seconds from the stop until the controller of a run with one trainer ends, if this happens after `at_s`."""
    stop, failed, trainers = ShutdownSignal(), asyncio.Event(), ["t"]
    members = SimpleNamespace(trainer=lambda: next(iter(trainers), None))
    pipelines = {"p": SimpleNamespace(members=members)}
    service: Any = SimpleNamespace(controller=SimpleNamespace(pipelines=pipelines), failed=failed, failure="")
    process: Any = SimpleNamespace(stop=stop, config=SimpleNamespace(run=SimpleNamespace(grace_s=GRACE_S)))

    def fail() -> None:
        service.failure = "the disk is gone"
        failed.set()

    events = {"trainer left": trainers.clear, "second signal": stop.insisted.set, "failure": fail}
    stop.request("received SIGTERM")
    loop = asyncio.get_running_loop()
    began = loop.time()
    if event in events:
        loop.call_later(at_s, events[event])
    await until_stopped(process, service)
    return loop.time() - began


@pytest.mark.parametrize("event", ["trainer left", "second signal", "failure"])
def test_the_controller_stays_until_the_trainers_have_left(event: str) -> None:
    with virtual_loop(lambda offload, function: 0.0) as loop:
        assert loop.run_until_complete(controller(event, 3.0)) == pytest.approx(3.0, abs=0.2)


def test_the_controller_does_not_stay_longer_than_it_may() -> None:
    with virtual_loop(lambda offload, function: 0.0) as loop:
        assert loop.run_until_complete(controller("none", 0.0)) == pytest.approx(STAY_SHARE * GRACE_S, abs=0.2)


def test_a_process_that_stops_does_not_fail_because_the_controller_is_gone() -> None:
    """Its gauges would cancel the checkpoint that is being saved."""
    process: Any = SimpleNamespace(stop=ShutdownSignal(), member="t")

    async def gone(request: object) -> None:
        raise PeerLost("the controller ended")

    client: Any = SimpleNamespace(call=gone, pipeline="p")
    lag: Any = SimpleNamespace(report=lambda: SimpleNamespace(values=dict))
    with virtual_loop(lambda offload, function: 0.0) as loop:
        with pytest.raises(PeerLost):
            loop.run_until_complete(reporting.report_gauges(process, client, lag))
        process.stop.request("received SIGTERM")
        loop.run_until_complete(reporting.report_gauges(process, client, lag))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_last_step_is_saved(folder: Path) -> None:
    (folder / "slow_loss.py").write_text(SLOW_LOSS)
    config = letters(folder, steps=1000, run=f'extra_path = ["{folder}"]\ngrace_s = 30', checkpoint_every=1000)
    run = start(folder, config, "--set", "pipeline.letters.train.loss=slow_loss:slow")
    run.wait_for_step(2)
    supervisor = psutil.Process(run.process.pid)
    for process in [*supervisor.children(recursive=True), supervisor]:
        process.terminate()
    code, output = run.end(60)
    assert code == 130, output
    assert not list((run.directory / "failures").glob("*"))
    saved = [path.name for path in (run.directory / "checkpoints" / "letters").glob("step-*")]
    assert saved == [f"step-{trained_steps(run.directory):08d}"]
