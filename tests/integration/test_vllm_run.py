"""`penstock run` with a vLLM server as the engine: it learns, and killing the server or its worker costs nothing.

Needs an interpreter with vLLM and this package: `PENSTOCK_VLLM_PYTHON=/path/to/python`, or vLLM in this environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import Running, start, step_lines, wait_for
from test_kill_matrix import alive, trained_prompts

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
WORKER = "letters.rollout.0"
PROMPTS, GROUPS_PER_STEP = 320, 8
START_S = 900.0
"""For a server to start on a machine that is busy with much else."""

FINITE = f"""
from penstock.envs.tasks import Copy

class Mine(Copy):
    count = {PROMPTS}

    def __init__(self, seed=0):
        super().__init__(letters=4, length=1, seed=seed)
"""

CONFIG = """
[run]
name = "test"
dir = "{folder}/runs"
extra_path = ["{folder}"]

[control]
stall_fail_after_s = 1800

[[pipeline]]
name = "letters"
steps = 1000
epochs = 1
[pipeline.env]
name = "mine:Mine"
[pipeline.model]
kind = "tiny"
hidden = 64
layers = 1
heads = 2
[pipeline.engine]
kind = "vllm"
python = "{python}"
eager = true
start_s = 900
options = ["--no-disable-uvicorn-access-log"]
[pipeline.rollout]
group_size = 8
max_new_tokens = 1
[pipeline.train]
groups_per_step = 8
[pipeline.optimizer]
learning_rate = 5e-3
decay_steps = 40
[pipeline.checkpoint]
every_steps = 5
"""


def server_of(run: Running) -> list[psutil.Process]:
    """The processes below the worker that belong to its vLLM server, the one that listens first."""
    try:
        below = run.child(WORKER).children(recursive=True)
        tops = [one for one in below if "penstock.rollout.io.vllm_main" in one.cmdline()]
        return [*tops, *(child for top in tops for child in top.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


class AccessLog:
    """What the server has answered, from its log: the witness that an update was under way."""

    def __init__(self, run: Running) -> None:
        self.path = run.directory / "logs" / f"{WORKER}.vllm.log"

    def updating(self) -> bool:
        """The server was paused and has not been resumed."""
        calls = re.findall(
            r'"POST /(pause|start_weight_update|update_weights|finish_weight_update|resume)', self.tail()
        )
        return bool(calls) and calls[-1] != "resume"

    def tail(self) -> str:
        with self.path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            return log.read().decode(errors="replace")


def kill_during_update(run: Running) -> list[psutil.Process]:
    """Kills the worker while it updates its server; returns the server's processes."""
    log = AccessLog(run)
    deadline = time.monotonic() + 300.0
    worker, server = run.child(WORKER), server_of(run)
    while not log.updating():
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, "no weight update was seen"
    worker.kill()
    wait_for(lambda: not any(alive(one) for one in server), 60, "the server of a killed worker to end")
    assert log.updating(), "the update was over before the kill"
    return server


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PYTHON, reason="vLLM is not importable, and PENSTOCK_VLLM_PYTHON names no interpreter")
def test_a_run_on_vllm_learns_and_survives_the_loss_of_its_server_and_of_its_worker(folder: Path) -> None:
    (folder / "mine.py").write_text(FINITE)
    config = folder / "run.toml"
    config.write_text(CONFIG.format(folder=folder, python=PYTHON))
    run = start(folder, config)

    run.wait_for_step(4, START_S)
    first = server_of(run)
    assert len(first) >= 3  # one listens, one schedules, one decodes
    first[0].kill()
    wait_for(lambda: not any(alive(one) for one in first), 60, "the rest of a killed server to end")

    run.wait_for_step(12, START_S)
    second = kill_during_update(run)
    assert second
    assert {one.pid for one in first}.isdisjoint(one.pid for one in second)

    code, output = run.end(START_S)
    assert code == 0, output + run.logs()
    assert "the vLLM server was killed by SIGKILL" in output
    assert f"{WORKER} ended (killed by SIGKILL)" in output

    counts = trained_prompts(run.directory)
    assert sorted(counts) == list(range(PROMPTS)), f"never trained: {sorted(set(range(PROMPTS)) - set(counts))}"
    assert set(counts.values()) == {1}, f"trained twice: {[prompt for prompt, count in counts.items() if count > 1]}"

    steps = step_lines(run.directory)
    assert abs(steps[0]["ratio_max"] - 1.0) < 1e-3  # the server's log-probabilities are those of the trainer's model
    assert steps[0]["reward"] < 0.4
    rewards = [step["reward"] for step in steps]
    assert max(sum(rewards[at : at + 5]) / 5 for at in range(len(rewards) - 4)) > 0.8, rewards
