"""Hundreds of steps on one GPU whose engine, worker and trainer are killed: every prompt is trained exactly once, and
all of the GPU's memory is given back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from running import Running, start, step_lines, trained_steps, wait_for
from test_kill_matrix import alive, assert_exact
from test_vllm_run import needs_vllm, server_of, started

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

STEPS, GROUPS_PER_STEP = 300, 4
START_S = 300.0
"""For a vLLM server."""
LEFT_MB = 64
"""Others may use the GPU a little."""

SETTINGS = (
    f"pipeline.letters.train.groups_per_step={GROUPS_PER_STEP}",
    "pipeline.letters.optimizer.learning_rate=1e-3",
    f"pipeline.letters.optimizer.decay_steps={STEPS}",
)
ENGINES = {"torch": "pipeline.letters.engine={kind = 'torch'}", "vllm": "pipeline.letters.engine.eager=false"}


def used_mb() -> int:
    """Of the first GPU's memory, by the driver."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout)


def further(run: Running, steps: int) -> None:
    """Waits until the run has trained that many more."""
    run.wait_for_step(trained_steps(run.directory) + steps, START_S)


def kill(run: Running, name: str) -> None:
    """With everything it has started."""
    victim = run.child(name)
    below = victim.children(recursive=True)
    victim.kill()
    wait_for(lambda: not any(alive(one) for one in below), 60, f"what {name} had started to end")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=needs_vllm)])
def test_through_kills_every_prompt_is_trained_once_and_the_memory_is_given_back(folder: Path, engine: str) -> None:
    before = used_mb()
    run = started(
        folder,
        "",
        prompts=STEPS * GROUPS_PER_STEP,
        settings=(ENGINES[engine], *SETTINGS),
        letters="steps = 1000\nepochs = 1",
    )
    run.wait_for_step(40, START_S)
    assert used_mb() > before + LEFT_MB  # it is on the GPU
    if engine == "vllm":
        server = server_of(run)
        server[0].kill()
        wait_for(lambda: not any(alive(one) for one in server), 60, "the rest of a killed server to end")
        further(run, 40)
    kill(run, "letters.rollout.0")
    further(run, 40)
    kill(run, "letters.trainer")
    further(run, 40)

    code, output = run.end(START_S)
    assert_exact(run, code, output, prompts=STEPS * GROUPS_PER_STEP)
    assert "letters.rollout.0 ended (killed by SIGKILL)" in output
    assert "letters.trainer ended (killed by SIGKILL)" in output
    steps = step_lines(run.directory)
    assert sum(step["reward"] for step in steps[-20:]) / 20 > 0.8
    if engine == "vllm":
        assert "the vLLM server was killed by SIGKILL" in output
        said = (run.directory / "logs" / "letters.rollout.0.vllm.log").read_text()
        assert "versions are copied from the trainer's memory" in said
    code, said = start(folder, run.directory, command="replay").end()
    assert code == 0, said
    wait_for(lambda: used_mb() < before + LEFT_MB, 30, "the memory of the GPU to be given back")
