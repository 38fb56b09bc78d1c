"""A disk that fills up while a run writes to it: one sentence, and a resume that finishes the work."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from running import letters, start, trained_steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 150


def fill(ballast: Path, room: int) -> bool:
    """Takes all but `room` bytes; False if the run took some of it first."""
    free = shutil.disk_usage(ballast.parent).free
    with ballast.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, free - room)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
    return True


@pytest.mark.parametrize("room_kb", [16, 400])
def test_a_full_disk_ends_the_run_with_one_sentence_and_resuming_finishes_it(folder: Path, disk: Path, room_kb: int):
    run = start(folder, letters(folder, steps=STEPS, checkpoint_every=5))
    run.wait_for_step(10)
    ballast = disk / "ballast"
    wait_for(lambda: fill(ballast, room_kb * 1024), 30, "room for the ballast")
    code, output = run.end(240)
    assert code == 1, output
    [sentence] = [line.lower() for line in output.splitlines() if line.startswith("penstock: ")]
    assert "no space" in sentence or "disk is full" in sentence, output
    assert trained_steps(run.directory) < STEPS, "the run was over before the disk was full"
    ballast.unlink()
    resumed = start(folder, "--resume", run.directory)
    code, output = resumed.end(240)
    assert code == 0, output + resumed.logs()
    assert trained_steps(run.directory) == STEPS
