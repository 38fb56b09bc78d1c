"""The last version is evaluated after its checkpoint was written, and may be the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import dump, validate
from penstock.launch.supervisor import Outcome, Supervisor, supervise
from penstock.runtime.rundir import RunDir


@pytest.mark.parametrize("keep_best", [True, False])
async def test_the_last_checkpoint_can_be_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_best: bool):
    pipeline = {"name": "p", "steps": 10, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    config = validate({"pipeline": [pipeline | {"checkpoint": {"keep_best": keep_best}}]})
    run = RunDir.create(tmp_path, "run", dump(config), "0")

    async def train(supervisor: Supervisor) -> Outcome:
        for step in (5, 10):
            saved = run.checkpoints("p") / f"step-{step:08d}"
            saved.mkdir(parents=True)
            (saved / "checkpoint.json").write_text(json.dumps({"step": step}))
            entry = {"kind": "evaluation", "pipeline": "p", "version": step, "eval/reward": step / 10}
            with run.metrics_path.open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
        return Outcome({}, interrupted=False, wall_s=1.0)

    monkeypatch.setattr(Supervisor, "run", train)
    nothing: Any = None
    await supervise(run, config, nothing, nothing, nothing)
    kept = run.checkpoints("p") / "best" / "checkpoint.json"
    assert kept.exists() == keep_best
    if keep_best:
        assert json.loads(kept.read_text())["step"] == 10
