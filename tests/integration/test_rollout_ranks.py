"""`penstock run` with workers of two ranks: it trains, survives a killed rank exactly, and names a rank that fails."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from running import Running, letters, start, step_lines, wait_for
from test_kill_matrix import assert_exact, finite

pytestmark = pytest.mark.timeout(400)

TWO_RANKS = "ranks = 2"


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


def test_a_worker_of_two_ranks_trains_to_the_end(folder: Path):
    run = start(folder, letters(folder, steps=6, rollout=TWO_RANKS))
    code, output = run.end(200)
    assert code == 0, output + run.logs()
    assert sorted(entry["step"] for entry in step_lines(run.directory)) == list(range(6))
    log = (run.directory / "logs" / "letters.rollout.0.rank1.log").read_text()
    assert "serving at version" in log
    assert "ended in good order" in log


