"""The report shows the samples of a run in little room."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.config.load import dump, load
from penstock.launch.report import report
from penstock.runtime.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]


def test_the_actions_of_a_long_episode_are_shortened(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", dump(load(ROOT / "examples" / "demo.toml")), "0")
    run.write_ending("complete", status={"pipelines": {"cartpole": {}}})
    folder = run.rollouts("cartpole")
    folder.mkdir()
    sample = {"step": 3, "sample": 7, "reward": 500.0, "length": 500, "actions": [1] * 500}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    shown = report(run)
    assert "1] … 500 in all" in shown
    assert shown.count("1, 1") < 20
