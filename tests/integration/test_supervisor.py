"""The supervisor with processes that only pretend: who is asked, who is waited for, who is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import dump, validate
from penstock.launch.processes import ProcessSpec
from penstock.launch.restarts import Ended
from penstock.launch.supervisor import Outcome, supervise
from penstock.runtime.rundir import RunDir
from penstock.runtime.shutdown import ShutdownSignal

pytestmark = pytest.mark.timeout(60)

CONFIG = validate(
    {
        "run": {"grace_s": 3600.0},
        "pipeline": [{"name": "p", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}],
    }
)


class Stubborn:
    """Ends when its tree is killed, or as it is told; never because it is asked to."""

    def __init__(self, name: str, killers: set[str]) -> None:
        self.where = name
        self.killers = killers
        """Processes whose trees are being killed: each waits for the others."""
        self.asked = False
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    @property
    def running(self) -> bool:
        return not self.ended.done()

    async def wait(self) -> Ended:
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        self.asked = True

    def kill(self) -> None:
        self.end(-9)

    async def kill_tree(self, timeout_s: float) -> None:
        self.killers.add(self.where)
        await until(lambda: len(self.killers) == 3)
        self.end(-9)

    def end(self, exit_code: int) -> None:
        if self.running:
            self.ended.set_result(Ended(exit_code))


class Stage:
    """Places the processes of a run, and keeps what is noted of it."""

    def __init__(self, run: RunDir) -> None:
        self.run_dir = run
        self.placed: dict[str, list[Stubborn]] = {}
        self.killers: set[str] = set()
        self.notes: list[str] = []
        self.stop = ShutdownSignal()

    async def open(self) -> None: ...

    async def place(self, spec: ProcessSpec, member: str, session: str) -> Stubborn:
        self.placed.setdefault(spec.name, []).append(Stubborn(spec.name, self.killers))
        return self.placed[spec.name][-1]

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class View:
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def note(self, line: str) -> None:
        self.notes.append(line)

    def update(self, status: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@asynccontextmanager
async def supervised(folder: Path) -> AsyncIterator[tuple[Stage, asyncio.Task[Outcome]]]:
    run = RunDir.create(folder, "run", dump(CONFIG), "0")
    run.write_failure("controller", "RunFailed", "the disk was full in an earlier session", 1)
    stage = Stage(run)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(supervise(run, CONFIG, stage, View(stage.notes), stage.stop))
        await until(lambda: len(stage.placed) == 3)
        yield stage, running


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_a_second_interrupt_does_not_wait_for_a_graceful_shutdown(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (stage, running):
        stage.stop.request("received SIGINT")
        await until(lambda: stage.placed["p.trainer"][0].asked)
        assert not stage.placed["controller"][0].asked, "its turn comes when the others have ended"
        stage.stop.insisted.set()
        outcome = await running
    assert outcome.interrupted
    assert [one.ended.result() for lives in stage.placed.values() for one in lives] == [Ended(-9)] * 3
    assert any("did not end at once and will be killed: p.trainer, p.rollout.0" in note for note in stage.notes)


async def test_a_process_that_leaves_early_is_started_again_however_friendly_its_exit_code(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (stage, _):
        stage.placed["p.rollout.0"][0].end(0)
        await until(lambda: len(stage.placed["p.rollout.0"]) == 2)
        stage.stop.request("that is all")
        stage.stop.insisted.set()
    assert any("p.rollout.0 ended (it exited although its pipeline has not ended" in note for note in stage.notes)


async def test_a_failure_that_a_restart_follows_is_not_that_of_the_run(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (stage, running):
        stage.killers.add("p.trainer")  # it waits for its restart, so there is nothing to kill
        stage.run_dir.write_failure("p.trainer", "OSError", "a file system was away for a moment", 1)
        stage.placed["p.trainer"][0].end(1)
        await until(lambda: any("away for a moment); starting it again" in note for note in stage.notes))
        stage.stop.request("received SIGINT")
        stage.stop.insisted.set()
        outcome = await running
    assert outcome.interrupted
    assert len(stage.placed["p.trainer"]) == 1
