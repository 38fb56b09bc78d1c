"""`penstock run` with a trainer of two ranks: it trains, survives a killed rank, and resumes on another number."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from running import Running, letters, start, step_lines, wait_for
from test_kill_matrix import assert_exact, finite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPTS = 80


def on_ranks(config: Path, ranks: int) -> Path:
    config.write_text(config.read_text().replace("[pipeline.train]", f"[pipeline.train]\nranks = {ranks}"))
    return config


def rank_1(run: Running) -> psutil.Process:
    """The other rank of the trainer that runs now."""

    def find() -> psutil.Process | None:
        trainer = run.children().get("letters.trainer")
        try:
            children = trainer.children() if trainer is not None else []
            return next((child for child in children if "trainer_rank" in child.cmdline()), None)
        except psutil.NoSuchProcess:
            return None

    return wait_for(find, 90, "a second rank")


def rank_log(run: Running) -> str:
    return (run.directory / "logs" / "letters.trainer.rank1.log").read_text()


def test_a_killed_rank_costs_its_trainer_and_no_prompt(folder: Path):
    run = start(folder, on_ranks(finite(folder, prompts=PROMPTS), 2))
    run.wait_for_step(2, 200)
    rank_1(run).send_signal(signal.SIGKILL)
    code, output = run.end(300)
    assert_exact(run, code, output, prompts=PROMPTS)
    assert "letters.trainer ended (PeerLost: rank 1" in output, "the trainer says which rank it lost"
    assert "ended gracefully" in rank_log(run), "its successor left together with its trainer"


def test_a_run_of_two_ranks_is_resumed_on_one(folder: Path):
    run = start(folder, on_ranks(letters(folder, steps=500, checkpoint_every=2), 2))
    run.wait_for_step(3, 200)
    run.interrupt()
    code, output = run.end(90)
    assert code == 130, output + run.logs()
    done = max(entry["step"] for entry in step_lines(run.directory))
    overrides = ["--set", f"pipeline.letters.steps={done + 4}", "--set", "pipeline.letters.train.ranks=1"]
    run = start(folder, "--resume", str(run.directory), *overrides)
    code, output = run.end(250)
    assert code == 0, output + run.logs()
    lines = step_lines(run.directory)
    assert {entry["step"] for entry in lines} == set(range(done + 4))
    warmup = 5  # of a tiny model
    slowest = 1 - 0.9 * (done + 3 - warmup) / (done + 4 - warmup)
    assert lines[-1]["learning_rate"] == pytest.approx(2e-3 * slowest), "it decays over the new length of the run"
