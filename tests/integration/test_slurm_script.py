"""The batch script for one node is a plain bash script, so it can be run without Slurm: stopped, and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import step_lines, wait_for

from penstock.config.load import load
from penstock.launch.slurm import batch_script

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "quickstart.toml"


@pytest.mark.timeout(300)
def test_a_job_that_is_ended_before_its_limit_goes_on_when_it_is_requeued(folder: Path):
    overrides = [f"run.dir={folder}", "pipeline.letters.steps=100", "pipeline.letters.evaluation.every_steps=0"]
    command = f"{sys.executable} -m penstock.cli.main"
    script = folder / "job.sh"
    script.write_text(batch_script(CONFIG, load(CONFIG, overrides), overrides, penstock=command))
    environment = os.environ | {"SLURM_JOB_ID": "7"}

    def steps() -> list[int]:
        return [line["step"] for directory in folder.glob("quickstart-*") for line in step_lines(directory)]

    job = subprocess.Popen(["bash", str(script)], env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(steps()) >= 3, 90)
    job.send_signal(signal.SIGTERM)  # as Slurm does, to the batch script alone
    assert job.wait(60) == 130
    assert max(steps()) < 99
    subprocess.run(
        ["bash", str(script)], env=environment, cwd=folder, check=True, timeout=200, stdout=subprocess.DEVNULL
    )
    assert sorted(steps()) == list(range(100))
    assert len(list(folder.glob("quickstart-*"))) == 1
