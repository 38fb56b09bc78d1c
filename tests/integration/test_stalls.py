"""Nothing hangs in silence: a live run can be asked, and one that cannot go on ends with the reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import letters, start, wait_for

import penstock
from penstock.engines.vllm.probe import build_of
from penstock.records.ids import PipelineName
from penstock.sim.replay import replay_run

pytestmark = pytest.mark.timeout(240)

STUCK = """
import time
from penstock.envs.tasks import Copy

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)
        self.calls = 0

    def score(self, prompts, completions, **columns):
        self.calls += 1
        if self.calls > 40:
            time.sleep(1000)
        return super().score(prompts, completions, **columns)
"""


def doctor(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "doctor", str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_doctor_of_a_live_run_and_of_a_dead_one(folder: Path):
    run = start(folder, letters(folder, steps=500))
    run.wait_for_step(2)
    asked = doctor(run.directory)
    assert asked.returncode == 0, asked.stderr
    assert "letters: running, step " in asked.stdout
    run.interrupt()
    assert run.end(30)[0] == 130
    asked = doctor(run.directory)
    assert asked.returncode == 1
    assert "the run has ended, no process can answer: interrupted" in asked.stderr
    assert "--resume" in asked.stderr
    asked = doctor(run.directory, "--at", "0.5")
    assert asked.returncode == 0, asked.stderr
    assert "letters: running, step 0/500" in asked.stdout
    again = replay_run(run.directory)
    assert not again.problem
    assert again.decisions > 10


@pytest.mark.slow
def test_a_stall_is_diagnosed_and_then_ends_the_run_with_that_sentence(folder: Path):
    (folder / "mine.py").write_text(STUCK)
    control = "[control]\nstall_after_s = 3\nstall_fail_after_s = 12\n"
    config = letters(folder, steps=500, run=f'extra_path = ["{folder}"]', extra=control)
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    run = start(folder, config)
    code, output = run.end(120)
    assert code == 1
    assert "Worker letters.rollout.0" in output, "the view names who should have moved, before the run fails"
    failure = "penstock: controller: letters: no progress for"
    (sentence,) = [line for line in output.splitlines() if line.startswith(failure)]
    assert "holds" in sentence
    again = replay_run(run.directory)
    assert not again.problem
    stood = replay_run(run.directory, again.took_s - 1.0)
    assert "Worker letters.rollout.0" in stood.diagnosis[PipelineName("letters")], "as the doctor said then"
    assert re.search(r"in 'reward score running for \d+ s, .*mine.py:\d+ score", sentence), "what runs, and where"


SLOW_TO_MAKE = """
import sys, time
from penstock.envs.tasks import Copy

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)
        if "rollout_worker" in sys.argv:
            time.sleep(1000)
"""

SERVER_THAT_LOADS = """#!/bin/sh
# An interpreter that has vLLM, and whose server never comes to answer.
case "$2" in *probe.py) echo '{"vllm": true, "penstock": "here", "build": "%s", "plugin": true}'; exit 0;; esac
exec sleep 1000
"""


def test_the_doctor_shows_a_worker_that_has_not_registered_yet(folder: Path):
    (folder / "mine.py").write_text(SLOW_TO_MAKE)
    config = letters(folder, steps=10_000, run=f'extra_path = ["{folder}"]\ngrace_s = 1')
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    run = start(folder, config)
    wait_for(lambda: "letters.trainer" in run.children() and "No rollout worker" in doctor(run.directory).stdout, 90)
    asked = doctor(run.directory)
    assert "unless it is loading its model" in asked.stdout
    assert re.search(r"letters.rollout.0 \(process \d+\) was started \d+ s ago; its log: ", asked.stdout)
    run.interrupt()
    assert run.end(60)[0] == 130


def test_a_server_that_is_loading_is_named(folder: Path):
    python = folder / "python"
    python.write_text(SERVER_THAT_LOADS % build_of(Path(penstock.__file__).parent))
    python.chmod(0o755)
    engine = f'[pipeline.engine]\nkind = "vllm"\npython = "{python}"\n'
    config = letters(folder, steps=10_000, run="grace_s = 2", extra=engine)
    run = start(folder, config, "--set", "pipeline.letters.model.hidden=64")
    loading = r"Worker letters.rollout.0\S* cannot lease .* in 'loading the vLLM server for \d+ s'"
    wait_for(lambda: re.search(loading, doctor(run.directory).stdout), 120)
    run.interrupt()
    code, output = run.end(60)
    assert code == 130, output
