"""Initialisation, training and scoring contend for a device, in real processes: who goes first, whose end frees it.

All pipelines train on device 0, and one of them generates there. Its worker, halted when it should leave, makes
all others wait: then there is time to look, to halt the one that waits, and to kill it once it has the device.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from running import TINY, Running, start, step_lines, trained_prompts, wait_for

from penstock.journal.reader import history
from penstock.pool import events as pool
from penstock.pool.lease import Hold
from penstock.pool.pool import Pool
from penstock.pool.state import State
from penstock.records.ids import POOL
from penstock.records.pool import Priority, Topology
from penstock.runtime.rundir import RunDir
from penstock.wire.codec import decode_section

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVICES = 4
PROMPTS = 200
HURRY = "hurry"
"""Rewards are slow until there is a file of this name."""
GATE = "gate"
"""The trainer of `new` does not come up while there is a file of this name; another one says that it is there."""

RUN = """\
[run]
name = "classes"
dir = "{folder}/runs"
extra_path = ["{folder}"]
max_restarts = 100
[pool]
devices = {devices}
"""

PIPELINE = (
    """
[[pipeline]]
name = "{name}"
steps = 1000
epochs = 1
train_devices = [0]
rollout_devices = {rollout_devices}
[pipeline.env]
name = "finite:Finite"
reward_concurrency = 1
"""
    + TINY
    + """
[pipeline.token_loss]
kl_coefficient = {kl}
[pipeline.checkpoint]
every_steps = 4
"""
)

DOING = {"initialisation": "initialising", "scoring": "scoring"}

FINITE = f"""
import sys
import time
from pathlib import Path
from penstock.envs.tasks import Copy

class Finite(Copy):
    count = {PROMPTS}

    def __init__(self, **options):
        super().__init__(**options)
        gate = Path(__file__).with_name("{GATE}")
        if "new.trainer" in sys.argv and gate.exists():
            gate.with_suffix(".reached").touch()
            while gate.exists():
                time.sleep(0.05)

    def score(self, prompts, completions, **columns):
        if not Path(__file__).with_name("{HURRY}").exists():
            time.sleep(2.0)  # the run must not be over before everything was seen
        return super().score(prompts, completions, **columns)
"""


def started(folder: Path, kl: dict[str, float]) -> Running:
    """Those with a divergence to weigh ask a reference; the first generates on device 0, the others anywhere else."""
    (folder / "finite.py").write_text(FINITE)
    config = folder / "run.toml"
    places = [[0]] + [list(range(1, DEVICES))] * (len(kl) - 1)
    tables = [
        PIPELINE.format(name=name, kl=coefficient, rollout_devices=place)
        for (name, coefficient), place in zip(kl.items(), places, strict=True)
    ]
    config.write_text(RUN.format(folder=folder, devices=DEVICES) + "".join(tables))
    run = start(folder, config)
    for name in kl:
        wait_for(lambda name=name: trains(run, name), 180, f"{name} to train its first step")
    return run


def trains(run: Running, name: str, more_than: int = 0) -> bool:
    assert run.process.poll() is None, run.output()
    return steps_of(run, name) > more_than


def steps_of(run: Running, name: str) -> int:
    return sum(line["pipeline"] == name for line in step_lines(run.directory))


def status(run: Running) -> dict[str, Any]:
    """The pool as the controller sees it."""
    directory = RunDir.open(run.directory)
    endpoint = directory.read_endpoint()
    assert endpoint is not None
    headers = {"Authorization": f"Bearer {directory.token()}"}
    return httpx.get(f"{endpoint.url}/v1/status", headers=headers, timeout=30).json()["pool"]


def on_device_0(run: Running) -> dict[str, Any] | None:
    return next((use for use in status(run)["uses"] if 0 in use["devices"]), None)


def process_of(run: Running, member: str) -> psutil.Process | None:
    """The process of this very incarnation."""
    for child in run.children().values():
        arguments = child.cmdline()
        if arguments[arguments.index("--member") + 1] == member:
            return child
    return None


def halted_worker(run: Running) -> psutil.Process:
    """A worker that is on device 0, and stays there: it is halted."""

    def halt() -> psutil.Process | None:
        use = on_device_0(run)
        worker = process_of(run, use["member"]) if use is not None and ".rollout." in use["member"] else None
        if worker is None:
            return None
        worker.suspend()
        now = on_device_0(run)
        if now is not None and use is not None and now["member"] == use["member"]:
            return worker
        worker.resume()
        return None

    return wait_for(halt, 120, "a worker on device 0")


def waiting(run: Running, kind: str, pipeline: str) -> bool:
    return any(f"({kind})" in line and line.startswith(pipeline) for line in status(run)["waiting"])


def killed_as_holder(run: Running, name: str, kind: str, gate: Path | None = None) -> bool:
    """Once it waits for device 0, a trainer is halted, given the device, and killed with it.

    One that is held back at a gate is let through when another waits already. False if they did not come before the
    pool ended the halted worker, which it does after 40 s.
    """
    worker, until = halted_worker(run), time.monotonic() + 36
    try:
        if gate is not None:
            wait_for(lambda: status(run)["waiting"], until - time.monotonic())
            gate.unlink()
        wait_for(lambda: waiting(run, kind, name), until - time.monotonic())
        trainer = run.child(f"{name}.trainer")
        trainer.suspend()
        if not waiting(run, kind, name):
            trainer.resume()
            return False
    except AssertionError:
        return False
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()

    def holds() -> bool:
        use = on_device_0(run)
        return use is not None and (use["pipeline"], use["doing"]) == (name, DOING[kind])

    wait_for(holds, 120, f"{name} to be given device 0 for {kind}")
    trainer.send_signal(signal.SIGKILL)
    wait_for(lambda: not holds(), 120, "the device to come back")
    return True


def killed_as_it_comes_up(run: Running) -> bool:
    """The same for a trainer that has just been started again, while other classes wait already."""
    gate = run.folder / GATE
    if not gate.exists():
        reached = gate.with_suffix(".reached")
        reached.unlink(missing_ok=True)
        gate.touch()
        run.child("new.trainer").send_signal(signal.SIGKILL)
        wait_for(reached.exists, 120, "the next trainer of new to come up")
        before = steps_of(run, "scoring")
        wait_for(lambda: trains(run, "scoring", before), 120, "the trainer of scoring to have come up too")
    return killed_as_holder(run, "new", "initialisation", gate)


def decisions(run: Running) -> list[tuple[pool.Event, dict[int, Hold], dict[int, Hold]]]:
    """The journal, decided again: every event of the pool, with the requests before and after it."""
    machine = Pool(Topology((DEVICES,)))
    decoder = msgspec.msgpack.Decoder(pool.Event, dec_hook=decode_section)
    told = []
    before: dict[int, Hold] = {}
    for entry in history(run.directory / "journal.sqlite"):
        if entry.pipeline != POOL:
            continue
        event = decoder.decode(entry.body)
        machine.handle(event, entry.at)
        machine.check()
        _, state = msgspec.msgpack.decode(machine.snapshot(), type=tuple[int, State], dec_hook=decode_section)
        told.append((event, before, state.holds))
        before = state.holds
    return told


def assert_strict(run: Running) -> None:
    """No class was served while a higher one waited for the same device, and nothing was taken from who held it.

    The one that had been promised the device had to wait again when the trainer of `new` came up.
    """
    ends = (pool.DevicesReleased, pool.DevicesRequested, pool.MemberLost, pool.TimePassed)
    passed_on = []
    for event, before, after in decisions(run):
        for number, hold in after.items():
            if hold.state == "waiting" and number in before and before[number].state == "assigned":
                passed_on.append(event)
            promised = hold.state in ("assigned", "held") and before.get(number, hold).state == "waiting"
            if promised or (number not in before and hold.state in ("assigned", "held")):
                passed = [one for one in after.values() if one.state == "waiting" and one.priority < hold.priority]
                assert not [one for one in passed if set(one.among) & set(hold.devices)], f"{hold} before {passed}"
        for number, hold in before.items():
            if hold.state == "held" and number not in after:
                assert isinstance(event, ends), event
                assert getattr(event, "member", hold.member) == hold.member, f"{hold} was ended by {event}"
    assert any(event.pipeline == "new" and event.priority is Priority.INITIALISATION for event in passed_on), passed_on


def assert_exact(run: Running, code: int, output: str, names: dict[str, float]) -> None:
    assert code == 0, output + run.logs()
    for name in names:
        counts = trained_prompts(run.directory, name)
        assert sorted(counts) == list(range(PROMPTS)), f"{name} left prompts out"
        assert set(counts.values()) == {1}, f"{name} trained prompts twice"


def test_classes_are_strict_only_generation_makes_way_and_a_kill_costs_one_turn(folder: Path):
    pipelines = {"blocking": 0.0, "new": 0.0, "scoring": 0.05, "training": 0.0}
    run = started(folder, pipelines)
    assert any(killed_as_holder(run, "scoring", "scoring") for _ in range(6)), status(run)
    assert any(killed_as_it_comes_up(run) for _ in range(6)), status(run)
    (folder / HURRY).touch()
    code, output = run.end(600)
    assert_exact(run, code, output, pipelines)
    assert_strict(run)
