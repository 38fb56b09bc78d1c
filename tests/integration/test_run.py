"""`penstock run` in real processes: it trains, ends, resumes, survives kills, and says what is wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from running import letters, start, step_lines, trained_steps, wait_for

pytestmark = pytest.mark.timeout(240)


@pytest.mark.smoke
def test_a_run_trains_and_ends_with_a_summary(folder: Path):
    run = start(folder, letters(folder, steps=6))
    code, output = run.end()
    assert code == 0, output
    assert "complete after" in output
    assert "6/6" in output
    (loops,) = [line for line in output.splitlines() if line.startswith("worst of the other loops: ")]
    assert "supervisor " in loops
    directory = run.directory
    assert sorted(entry["step"] for entry in step_lines(directory)) == list(range(6))
    for name in ("config.toml", "journal.sqlite", "plots/rewards.png", "logs/controller.log"):
        assert (directory / name).exists(), name
    assert list((directory / "checkpoints" / "letters").iterdir())


def test_an_interrupted_run_goes_on_where_it_stopped(folder: Path):
    run = start(folder, letters(folder, steps=30))
    run.wait_for_step(4)
    run.interrupt()
    code, output = run.end(30)
    assert code == 130, output
    assert "penstock run --resume" in output
    done = trained_steps(run.directory)
    assert done < 30
    assert f" {done}/30 " in output, "what was trained while it stopped is in the summary"
    again = start(folder, "--resume", run.directory)
    code, output = again.end()
    assert code == 0, output
    steps = [entry["step"] for entry in step_lines(run.directory)]
    assert sorted(steps) == list(range(30)), "a clean stop saves a checkpoint, so no step is trained twice"


@pytest.mark.parametrize("victim", ["letters.rollout.0", "letters.trainer", "controller"])
def test_a_killed_process_is_replaced_and_the_run_completes(folder: Path, victim: str):
    run = start(folder, letters(folder, steps=80))
    run.wait_for_step(3)
    before = run.child(victim)
    before.send_signal(signal.SIGKILL)
    wait_for(lambda: run.child(victim).pid != before.pid, 30, f"a new {victim}")
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert {entry["step"] for entry in step_lines(run.directory)} == set(range(80))
    assert "SIGKILL" in output


def test_a_frozen_worker_is_found_out_killed_and_replaced(folder: Path):
    """It does not die and its heartbeat goes on: only its lack of progress gives it away."""
    control = "[control]\nsuspect_after_s = 2\nevict_after_s = 4\nwedged_after_s = 5\n"
    run = start(folder, letters(folder, steps=60, extra=control))
    run.wait_for_step(3)
    frozen = run.child("letters.rollout.0")
    frozen.send_signal(signal.SIGSTOP)
    wait_for(lambda: run.child("letters.rollout.0").pid != frozen.pid, 60, "a new worker")
    code, output = run.end()
    assert code == 0, output
    assert {entry["step"] for entry in step_lines(run.directory)} == set(range(60))


def test_a_killed_supervisor_takes_its_processes_along_and_the_run_can_be_resumed(folder: Path):
    run = start(folder, letters(folder, steps=15, checkpoint_every=2))
    run.wait_for_step(4)
    children = list(run.children().values())
    assert len(children) == 3
    run.process.kill()
    run.process.communicate(timeout=10)
    for child in children:
        wait_for(lambda child=child: not child.is_running() or child.status() == "zombie", 10, f"{child} to die")
    again = start(folder, "--resume", run.directory)
    code, output = again.end()
    assert code == 0, output
    assert {entry["step"] for entry in step_lines(run.directory)} == set(range(15))


def test_a_directory_in_use_is_refused(folder: Path):
    run = start(folder, letters(folder, steps=500))
    run.wait_for_step(0)
    code, output = start(folder, "--resume", run.directory).end(30)
    assert code == 2
    assert "is being run by another process" in output
    run.interrupt()
    assert run.end(30)[0] == 130
