"""SIGKILL at random times over a run of finitely many prompts: each is trained exactly once, nothing is left behind."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from running import Running, letters, start, trained_prompts, trained_steps, wait_for

PROMPTS = 240
GROUPS_PER_STEP = 4
SEED = 20261115

FINITE = """
import time
from penstock.envs.tasks import Copy

class Mine(Copy):
    count = PROMPTS

    def __init__(self, seed=0):
        super().__init__(seed=seed)

    def prompt(self, position):
        time.sleep(0.03)  # prompts are prepared one after the other, so that there is a run to kill things in
        return super().prompt(position)
"""


def finite(folder: Path, *, prompts: int = PROMPTS, rollout: str = "") -> Path:
    (folder / "mine.py").write_text(f"PROMPTS = {prompts}\n{FINITE}")
    config = letters(
        folder,
        steps=1000,
        run=f'extra_path = ["{folder}"]\nmax_restarts = 1000',
        pipeline="epochs = 1",
        rollout=rollout,
        checkpoint_every=5,
    )
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    return config


def assert_exact(run: Running, code: int, output: str, *, prompts: int = PROMPTS) -> None:
    assert code == 0, output + run.logs()
    counts = trained_prompts(run.directory)
    assert sorted(counts) == list(range(prompts)), f"never trained: {sorted(set(range(prompts)) - set(counts))}"
    assert set(counts.values()) == {1}, f"trained twice: {[prompt for prompt, count in counts.items() if count > 1]}"
    assert trained_steps(run.directory) >= prompts / GROUPS_PER_STEP


def kill_children(folder: Path, victim: str, kills: int) -> None:
    dice = random.Random(f"{SEED} {victim}")
    run = start(folder, finite(folder))
    run.wait_for_step(1)
    fired = 0
    while fired < kills and run.process.poll() is None:
        time.sleep(dice.uniform(0.0, 3.0))  # the random time of the kill, not a wait for anything
        fired += kill_child(run, victim)
    code, output = run.end(300)
    assert fired, "the run ended before anything was killed"
    assert output.count("SIGKILL") >= fired, output
    assert_exact(run, code, output)


def kill_child(run: Running, victim: str) -> bool:
    """False when there was no process to kill, or the run was ending: then it reports no kill."""
    child = run.children().get(victim)
    if child is None or run.process.poll() is not None:
        return False
    try:
        child.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False

    def replaced() -> bool:
        if run.process.poll() is not None:
            return True
        found = run.children().get(victim)
        return found is not None and found.pid != child.pid

    wait_for(replaced, 60, f"a new {victim}")
    return run.process.poll() is None


def kill_supervisor(folder: Path, kills: int) -> None:
    dice = random.Random(f"{SEED} supervisor")
    run = start(folder, finite(folder))
    run.wait_for_step(1)
    fired = 0
    while fired < kills and run.process.poll() is None:
        time.sleep(dice.uniform(0.0, 3.0))  # the random time of the kill, not a wait for anything
        run = kill_and_resume(run, folder)
        fired += 1
    assert_exact(run, *run.end(300))
    assert fired


def kill_and_resume(run: Running, folder: Path) -> Running:
    directory = run.directory
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    run.process.communicate(timeout=10)
    wait_for(lambda: not any(alive(child) for child in children), 10, "the children of a killed supervisor to end")
    before = trained_steps(directory)
    again = start(folder, "--resume", directory)
    wait_for(lambda: again.process.poll() is not None or trained_steps(directory) > before, 120, "a further step")
    return again


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trainer_that_finds_its_newest_checkpoint_damaged_goes_on_from_the_one_before(folder: Path):
    run = start(folder, finite(folder))
    checkpoints = run.directory / "checkpoints" / "letters"
    wait_for(lambda: len(list(checkpoints.glob("step-*"))) == 2, 120, "two checkpoints")
    trainer = run.child("letters.trainer")
    trainer.suspend()
    newest = max(checkpoints.glob("step-*"))
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    trainer.kill()
    code, output = run.end(300)
    assert_exact(run, code, output)
    assert f"{newest} is damaged" in (run.directory / "logs" / "letters.trainer.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["letters.rollout.0", "letters.trainer", "controller"])
def test_killed_a_few_times_every_prompt_is_trained_exactly_once(folder: Path, victim: str):
    kill_children(folder, victim, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_supervisor_killed_a_few_times_every_prompt_is_trained_exactly_once(folder: Path):
    kill_supervisor(folder, kills=3)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["letters.rollout.0", "letters.trainer", "controller", "supervisor"])
def test_killed_twenty_times_every_prompt_is_trained_exactly_once(folder: Path, victim: str):
    if victim == "supervisor":
        kill_supervisor(folder, kills=20)
    else:
        kill_children(folder, victim, kills=20)
