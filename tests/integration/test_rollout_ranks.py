"""`penstock run` with workers of two ranks: it trains, survives a killed rank exactly, and names a rank that fails."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from running import Running, letters, start, step_lines, wait_for
from test_kill_matrix import assert_exact, finite
from test_shared_pool import moves, overlapping

pytestmark = pytest.mark.timeout(400)

TWO_RANKS = "ranks = 2"
PROMPTS = 80

FAILS_IN_RANK_1 = """
import sys
from penstock.envs.tasks import Copy
from penstock.errors import RunFailed

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)

    def prompt(self, position):
        if "rollout_rank" in sys.argv and position > 6:
            raise RunFailed("these prompts are broken for good")
        return super().prompt(position)
"""


def rank_1(run: Running) -> psutil.Process:
    """The other rank of the worker that runs now."""

    def find() -> psutil.Process | None:
        worker = run.children().get("letters.rollout.0")
        try:
            children = worker.children() if worker is not None else []
            return next((child for child in children if "rollout_rank" in child.cmdline()), None)
        except psutil.NoSuchProcess:
            return None

    return wait_for(find, 90, "a second rank")


def rank_log(run: Running, name: str = "letters.rollout.0.rank1") -> str:
    return (run.directory / "logs" / f"{name}.log").read_text()


@pytest.mark.slow
def test_a_worker_of_two_ranks_trains_and_leaves_together(folder: Path):
    run = start(folder, letters(folder, steps=6, rollout=TWO_RANKS))
    code, output = run.end(200)
    assert code == 0, output + run.logs()
    assert sorted(entry["step"] for entry in step_lines(run.directory)) == list(range(6))
    assert re.search("serving at version [1-9]", rank_log(run)), "rank 1 has loaded what was trained"
    assert "ended gracefully" in rank_log(run)


def test_a_killed_rank_costs_its_worker_and_no_prompt(folder: Path):
    run = start(folder, finite(folder, prompts=PROMPTS, rollout=TWO_RANKS))
    run.wait_for_step(2, 150)
    rank_1(run).send_signal(signal.SIGKILL)
    code, output = run.end(250)
    assert_exact(run, code, output, prompts=PROMPTS)
    assert "letters.rollout.0 ended (PeerLost: rank 1" in output, "the worker says which rank it lost"
    assert re.search("serving at version [1-9]", rank_log(run)), "rank 1 has loaded what was trained"
    assert "ended gracefully" in rank_log(run), "its successor left together with its worker"


def test_a_rank_that_fails_for_good_is_named_with_its_error(folder: Path):
    (folder / "mine.py").write_text(FAILS_IN_RANK_1)
    config = letters(folder, steps=50, run=f'extra_path = ["{folder}"]', rollout=TWO_RANKS)
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    code, output = start(folder, config).end(200)
    assert code == 1, output
    assert "rank 1: these prompts are broken for good" in " ".join(output.split())


@pytest.mark.slow
def test_ranks_of_an_interrupted_run_are_drained_and_not_killed(folder: Path):
    run = start(folder, letters(folder, steps=500, rollout=TWO_RANKS))
    run.wait_for_step(1, 150)
    assert rank_1(run).is_running()
    run.interrupt()
    code, output = run.end(60)
    assert code == 130, output + run.logs()
    assert "ended gracefully" in rank_log(run)


@pytest.mark.slow
def test_ranks_sleep_and_wake_together_by_order_of_the_pool(folder: Path):
    config = overlapping(folder, {"left": [0, 1], "right": [2, 3]}, steps=8, workers=1)
    config.write_text(config.read_text().replace("workers = 1", f"workers = 1\n{TWO_RANKS}\ndevices_per_worker = 2"))
    run = start(folder, config)
    code, output = run.end(350)
    assert code == 0, output + run.logs()
    assert moves(run)["pool_move_done"] > 2, "generation was put to sleep and woken"
    for name in ("left", "right"):
        assert {entry["step"] for entry in step_lines(run.directory) if entry["pipeline"] == name} == set(range(8))
        assert "ended gracefully" in rank_log(run, f"{name}.rollout.0.rank1")
