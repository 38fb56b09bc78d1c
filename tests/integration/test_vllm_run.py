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

import msgspec
import psutil
import pytest
from running import Running, start, step_lines, wait_for
from test_kill_matrix import alive, trained_prompts

from penstock.journal.reader import history
from penstock.records.ids import POOL

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
WORKER = "letters.rollout.0"
PROMPTS, GROUPS_PER_STEP = 320, 8
START_S = 900.0
"""For a server to start on a machine that is busy with much else."""

FINITE = """
from penstock.envs.tasks import Copy

class Mine(Copy):
    count = {prompts}

    def __init__(self, seed=0):
        super().__init__(letters=4, length=1, seed=seed)
"""

RUN = """
[run]
name = "test"
dir = "{folder}/runs"
extra_path = ["{folder}"]

[control]
stall_fail_after_s = 1800
"""

PIPELINE = """
[[pipeline]]
name = "{name}"
{length}
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

needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="vLLM is not importable, and PENSTOCK_VLLM_PYTHON names no interpreter"
)


def started(
    folder: Path, pool: str, *, prompts: int = PROMPTS, settings: tuple[str, ...] = (), **pipelines: str
) -> Running:
    """A run of these pipelines, each as long as it says, with further settings."""
    (folder / "mine.py").write_text(FINITE.format(prompts=prompts))
    config = folder / "run.toml"
    tables = [PIPELINE.format(name=name, length=length, python=PYTHON) for name, length in pipelines.items()]
    config.write_text(RUN.format(folder=folder) + pool + "".join(tables))
    return start(folder, config, *(word for setting in settings for word in ("--set", setting)))


def server_of(run: Running, worker: str = WORKER) -> list[psutil.Process]:
    """The processes below the worker that belong to its vLLM server, the one that listens first."""
    try:
        below = run.child(worker).children(recursive=True)
        tops = [one for one in below if "penstock.engines.vllm.main" in one.cmdline()]
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
@needs_vllm
def test_a_run_on_vllm_learns_and_survives_the_loss_of_its_server_and_of_its_worker(folder: Path) -> None:
    run = started(folder, "", letters="steps = 1000\nepochs = 1")

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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_vllm
def test_adapters_are_loaded_while_the_server_goes_on(folder: Path) -> None:
    pytest.importorskip("peft")
    run = started(folder, "", letters="steps = 12\n[pipeline.lora]\nrank = 8\n")
    code, output = run.end(START_S)
    assert code == 0, output + run.logs()
    calls = (run.directory / "logs" / f"{WORKER}.vllm.log").read_text()
    assert calls.count('"POST /v1/load_lora_adapter') > 6, "every version that was served is an adapter of its own"
    assert '"POST /v1/unload_lora_adapter' in calls
    assert calls.count('"POST /resume') == 1, "once it had its first adapter, nothing stood still for another"
    steps = step_lines(run.directory)
    assert abs(steps[0]["ratio_max"] - 1.0) < 1e-3  # the server's log-probabilities are those of the trainer's model
    assert all(abs(step["ratio_mean"] - 1.0) < 0.2 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_vllm
def test_a_model_divided_over_two_processes_is_replaced_as_a_whole_when_one_is_killed(folder: Path) -> None:
    run = started(folder, "", settings=("pipeline.letters.engine.tensor_parallel=2",), letters="steps = 24")
    run.wait_for_step(6, START_S)
    first = server_of(run)
    ranks = [one for one in first if one.name().startswith("VLLM::Worker_TP")]
    assert len(ranks) == 2
    ranks[1].kill()
    wait_for(lambda: not any(alive(one) for one in first), 120, "the rest of a killed server to end")

    code, output = run.end(START_S)
    assert code == 0, output + run.logs()
    steps = step_lines(run.directory)
    assert len(steps) >= 24
    assert abs(steps[0]["ratio_max"] - 1.0) < 1e-3  # both had loaded their part of the trainer's model
    assert sum(step["reward"] for step in steps[-5:]) / 5 > 0.6 > 0.4 > steps[0]["reward"]


def first_orders(run: Running) -> dict[str, float]:
    """When each worker was first given a device, by name."""
    found: dict[str, float] = {}
    for entry in history(run.directory / "journal.sqlite"):
        notes = msgspec.msgpack.decode(entry.decided) if entry.pipeline == POOL and entry.decided else {}
        for member, _, action, _ in notes.get("ordered", ()):
            if action == "wake":
                found.setdefault(member.rpartition("-")[0], entry.at)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_vllm
def test_servers_are_started_by_order_and_take_turns_on_the_only_device(folder: Path) -> None:
    names = ("first", "second")
    pool = "[pool]\ndevices = 1\n"
    run = started(folder, pool, **dict.fromkeys(names, "steps = 3"))
    began: dict[str, float] = {}
    deadline = time.monotonic() + 3 * START_S
    while run.process.poll() is None:
        assert time.monotonic() < deadline, run.logs()
        for worker in (f"{name}.rollout.0" for name in names):
            if worker not in began and worker in run.children() and (server := server_of(run, worker)):
                began[worker] = server[0].create_time()
        time.sleep(0.05)
    code, output = run.end(60)
    assert code == 0, output + run.logs()
    assert sorted((step["pipeline"], step["step"]) for step in step_lines(run.directory)) == [
        (name, step) for name in names for step in range(3)
    ]
    ordered = first_orders(run)
    assert began.keys() == ordered.keys()
    for worker, at in ordered.items():
        assert began[worker] > at - 1.0, f"the server of {worker} was there before the pool gave it a device"
        log = (run.directory / "logs" / f"{worker}.vllm.log").read_text()
        assert log.count("POST /sleep") > 0, f"{worker} was never put to sleep"
