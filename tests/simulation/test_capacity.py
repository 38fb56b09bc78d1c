"""What a configuration would reach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

CONFIG = """
[[pipeline]]
name = "p"
steps = 12
[pipeline.env]
name = "copy"
[pipeline.model]
kind = "tiny"
[pipeline.rollout]
group_size = 2
batch_samples = 4
workers = 1
[pipeline.train]
groups_per_step = 4
max_staleness = 2
"""


@pytest.mark.slow
def test_where_the_workers_are_too_few_another_one_helps_and_a_larger_bound_does_not(tmp_path: Path) -> None:
    config, picture = tmp_path / "config.toml", tmp_path / "capacity.png"
    config.write_text(CONFIG)
    result = CliRunner().invoke(app, ["simulate", str(config), "--capacity", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert re.search(r"as configured +[\d.]+ +workers", result.output)
    (more,) = re.findall(r"one worker more +[\d.]+ +([+-]\d+)%", result.output)
    (longer,) = re.findall(r"staleness ≤ 3 +[\d.]+ +([+-]\d+)%", result.output)
    assert int(more) > 50
    assert int(longer) < 10
    assert picture.read_bytes().startswith(b"\x89PNG")
