"""Metrics reach the libraries people look at, and nothing that happens there can hurt a run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from running import letters, start, step_lines

pytestmark = pytest.mark.timeout(240)

BROKEN = 'raise RuntimeError("no network in the cellar")\n'
HANGING = "import time\ndef init(**kwargs):\n    time.sleep(3600)\n"


STAGES = {"lease_s", "prepare_s", "generate_s", "score_s", "deliver_s", "wait_s", "fetch_s", "step_s", "publish_s"}
EXPECTED = STAGES | {
    "reward",
    "reward_std",
    "completion_length_mean",
    "completion_length_max",
    "truncated_share",
    "groups_without_spread_share",
    "dropped",
    "tokens_per_s",
}
"""What every line of a step has. A GPU has its share and memory."""
REWARDS = {f"reward/{name}/{of}" for name in ("exact_answer", "matching_positions") for of in ("mean", "std")}


def test_tensorboard_gets_every_step_of_a_run_that_is_resumed(folder: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = letters(folder, steps=24, extra='[metrics]\nsinks = ["tensorboard"]\n')
    scored = 'name = "copy"\nrewards = ["exact_answer", "matching_positions"]'
    config.write_text(config.read_text().replace('name = "copy"', scored))
    run = start(folder, config)
    run.wait_for_step(3)
    run.interrupt()
    assert run.end(60)[0] == 130
    code, output = start(folder, "--resume", run.directory).end()
    assert code == 0, output
    events = EventAccumulator(str(run.directory / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    rewards = {event.step: pytest.approx(event.tensor_proto.float_val[0]) for event in events.Tensors("letters/reward")}
    assert rewards == {entry["step"]: entry["reward"] for entry in step_lines(run.directory)}
    assert len(events.Tensors("letters/reward")) == 24, "each step once"
    sent_to_the_sink = {tag.removeprefix("letters/") for tag in events.Tags()["tensors"]}
    assert sent_to_the_sink >= EXPECTED | REWARDS
    assert all(entry.keys() >= EXPECTED | REWARDS for entry in step_lines(run.directory)), "in every line"
    assert max(entry["deliver_s"] for entry in step_lines(run.directory)) > 0
    (run.directory / "sinks" / "tensorboard.offset").unlink()  # as if it had not been told anything
    for sent in (24, 0):
        code, output = start(folder, run.directory, "--to", "tensorboard", command="publish").end(60)
        assert code == 0, output
        assert f"sent {sent} lines" in output


def test_libraries_that_fail_or_hang_cost_their_own_processes_only(folder: Path):
    (folder / "wandb.py").write_text(BROKEN)
    (folder / "trackio.py").write_text(HANGING)
    extra = '[metrics]\nsinks = ["wandb", "trackio"]\n'
    run = start(folder, letters(folder, steps=12, run=f'extra_path = ["{folder}"]\ngrace_s = 3', extra=extra))
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert sorted(entry["step"] for entry in step_lines(run.directory)) == list(range(12))
    assert "no network in the cellar" in run.logs(), "one failed"
    assert "will be killed: sink.trackio" in output, "and one hung"


@pytest.mark.slow
def test_wandb_and_trackio_take_a_whole_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    run = start(folder, letters(folder, steps=6, extra='[metrics]\nsinks = ["wandb", "trackio"]\nproject = "tests"\n'))
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert "is not restarted" not in output
    assert list(run.directory.glob("wandb/offline-run-*/*.wandb"))
    (database,) = (folder / "trackio").glob("tests*.db")
    with sqlite3.connect(database) as connection:
        (steps,) = connection.execute("SELECT count(DISTINCT step) FROM metrics").fetchone()
    assert steps == 6
