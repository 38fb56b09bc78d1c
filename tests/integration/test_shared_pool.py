"""Several pipelines on one device pool, in real processes: everyone is served, and one's trouble is its own."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from running import TINY, Running, start, step_lines, wait_for

from penstock.journal.reader import history
from penstock.runtime.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

POOL = """\
[run]
name = "shared"
dir = "{folder}/runs"

[pool]
devices = 4
"""

PIPELINE = (
    """
[[pipeline]]
name = "{name}"
steps = {steps}
train_devices = {train}
rollout_devices = [0, 1, 2, 3]
[pipeline.env]
name = "copy"
"""
    + TINY
    + """workers = {workers}
[pipeline.checkpoint]
every_steps = 4
"""
)


def overlapping(folder: Path, trains: dict[str, list[int]], *, steps: int, workers: int) -> Path:
    path = folder / "run.toml"
    tables = [PIPELINE.format(name=name, train=train, steps=steps, workers=workers) for name, train in trains.items()]
    path.write_text(POOL.format(folder=folder) + "".join(tables))
    return path


def steps_of(run: Running, name: str) -> set[int]:
    return {entry["step"] for entry in step_lines(run.directory) if entry["pipeline"] == name}


def moves(run: Running) -> Counter[str]:
    """What happened in the pool, from the journal."""
    events = (msgspec.msgpack.decode(entry.body) for entry in history(run.directory / "journal.sqlite"))
    return Counter(event["type"] for event in events if event["type"].startswith("pool_"))


def test_two_fully_overlapping_pipelines_share_four_devices(folder: Path):
    run = start(folder, overlapping(folder, {"left": [0, 1], "right": [2, 3]}, steps=12, workers=2))
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    assert steps_of(run, "left") == steps_of(run, "right") == set(range(12))
    happened = moves(run)
    assert happened["pool_devices_requested"] >= 24, "every step of both takes its turn on shared devices"
    assert happened["pool_move_done"] > 4, "generation was put to sleep and woken"


def test_five_pipelines_on_four_devices_all_finish(folder: Path):
    trains = {f"p{number}": [number % 4] for number in range(5)}
    run = start(folder, overlapping(folder, trains, steps=4, workers=1))
    code, output = run.end(380)
    assert code == 0, output + run.logs()
    for name in trains:
        assert steps_of(run, name) == set(range(4))


def uses(run: Running) -> list[dict[str, Any]]:
    """Who is on which device at this moment, as the controller says."""
    directory = RunDir.open(run.directory)
    endpoint = directory.read_endpoint()
    if endpoint is None:
        return []
    headers = {"Authorization": f"Bearer {directory.token()}"}
    try:
        return httpx.get(f"{endpoint.url}/v1/status", headers=headers, timeout=10).json()["pool"]["uses"]
    except httpx.TransportError:
        return []


def halted_in_mid_move(run: Running, name: str) -> psutil.Process:
    """The one worker of a pipeline, halted: what it is ordered then is a move in flight until it goes on or dies."""
    worker = run.child(f"{name}.rollout.0")
    worker.suspend()
    moving = ("leaving", "waking")
    wait_for(
        lambda: any(use["pipeline"] == name and use["doing"] in moving for use in uses(run)),
        60,
        f"the worker of {name} to be ordered on to a device or off it",
    )
    return worker


@pytest.mark.parametrize("victim", ["left.rollout.0", "left.trainer", "controller"])
def test_a_kill_in_the_middle_of_a_resize_costs_no_other_pipeline(folder: Path, victim: str):
    # The one trains on all four devices: with each of its steps the worker of the other must leave, wherever it is.
    run = start(folder, overlapping(folder, {"left": [0], "right": [0, 1, 2, 3]}, steps=12, workers=1))
    wait_for(lambda: run.process.poll() is not None or steps_of(run, "left"), 120)
    worker = halted_in_mid_move(run, "left")
    run.child(victim).send_signal(signal.SIGKILL)
    if victim != "left.rollout.0":
        worker.resume()
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    assert "SIGKILL" in output
    assert steps_of(run, "left") == steps_of(run, "right") == set(range(12))
