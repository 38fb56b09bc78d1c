"""What the user's code starts and detaches ends with its worker, and all of it with the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from running import Running, start, wait_for
from test_bad_input import MINE, with_environment

from penstock.runtime.process import is_alive

pytestmark = pytest.mark.timeout(240)

DETACHES = (
    MINE
    + """
    def score(self, prompts, completions, **columns):
        import os, subprocess, sys, time
        from pathlib import Path
        folder = Path({folder!r})
        member = os.environ["PENSTOCK_MEMBER"]
        marks = [folder / f"{{member}} {{way}}" for way in ("forked", "daemon", "command", "clean")]
        if not marks[0].exists():
            def fork(mark, twice):
                child = os.fork()
                if child == 0:
                    os.setsid()
                    if twice and os.fork():
                        os._exit(0)
                    Path(f"{{mark}}.tmp").write_text(str(os.getpid()))
                    Path(f"{{mark}}.tmp").rename(mark)
                    time.sleep(600)
                    os._exit(0)
                if twice:
                    os.waitpid(child, 0)
            fork(marks[0], False)
            fork(marks[1], True)
            script = 'sleep 600 & echo $! > "$0.tmp"; mv "$0.tmp" "$0"'
            for mark, variables in ((marks[2], None), (marks[3], {{"PATH": os.environ["PATH"]}})):
                subprocess.run(["setsid", "nohup", "sh", "-c", script, str(mark)], env=variables, stdout=-3, stderr=-3)
        while not all(mark.exists() for mark in marks):
            time.sleep(0.01)
        return super().score(prompts, completions, **columns)
"""
)


@pytest.fixture
def run(folder: Path) -> Running:
    """A run whose worker has detached four processes: forked, forked twice, a command, one without its environment."""
    (folder / "marks").mkdir()
    source = DETACHES.format(folder=str(folder / "marks"))
    run = start(folder, with_environment(folder, source, steps=10_000))
    run.wait_for_step(1)
    assert len(alive_of(run)) == 4
    return run


def alive_of(run: Running) -> dict[str, int]:
    """The detached processes that are alive, by worker and way."""
    marks = {path.name: int(path.read_text()) for path in (run.folder / "marks").glob("* *") if path.suffix != ".tmp"}
    return {name: pid for name, pid in marks.items() if is_alive(pid)}


def worker_of(run: Running) -> psutil.Process:
    """The worker, and not one that was forked from it and adopted by the supervisor."""
    children = psutil.Process(run.process.pid).children()
    return next(one for one in children if "rollout_worker" in one.cmdline() and os.getsid(one.pid) == one.pid)


def test_they_end_with_the_run(run: Running):
    run.interrupt()
    code, output = run.end(60)
    assert code == 130, output
    assert alive_of(run) == {}
    assert "left processes behind" in run.logs()


def test_they_end_with_their_worker_and_the_rest_with_the_run(run: Running):
    worker = worker_of(run)
    arguments = worker.cmdline()
    first = arguments[arguments.index("--member") + 1]
    worker.send_signal(signal.SIGKILL)
    wait_for(lambda: len([name for name in alive_of(run) if first not in name]) == 4, 60, "the next worker")
    assert [name.split()[1] for name in alive_of(run) if first in name] == ["clean"]
    run.interrupt()
    run.process.send_signal(signal.SIGINT)  # at once
    run.end(60)
    assert alive_of(run) == {}


def test_those_that_a_killed_supervisor_left_end_when_it_is_resumed(run: Running):
    worker = worker_of(run)
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not worker.is_running(), 10, "the worker to end")
    left = alive_of(run)
    assert len(left) == 4, "nobody is there to end them"
    again = start(run.folder, "--resume", run.directory)
    wait_for(lambda: len([pid for pid in left.values() if is_alive(pid)]) <= 1, 60, "those of the former start to end")
    again.interrupt()
    again.end(60)
    for pid in alive_of(run).values():  # without its environment it cannot be told from other programs
        os.kill(pid, signal.SIGKILL)
