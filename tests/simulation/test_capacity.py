"""What a configuration would reach."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.launch.simulated import capacity

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
workers = {workers}
[pipeline.train]
groups_per_step = 4
max_staleness = {bound}
"""


def test_the_command_prints_and_draws_what_a_configuration_would_reach(tmp_path: Path) -> None:
    config, picture = tmp_path / "config.toml", tmp_path / "capacity.png"
    config.write_text(CONFIG.format(workers=1, bound=1))
    result = CliRunner().invoke(app, ["simulate", str(config), "--capacity", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "workers" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_where_the_workers_are_too_few_another_one_helps_and_a_larger_bound_does_not(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(workers=1, bound=2))
    (found,) = capacity(config, None)
    assert found.configured.bottleneck == "workers"
    assert found.one_more_worker.samples_per_s > 1.5 * found.configured.samples_per_s
    assert found.larger_bound.samples_per_s < 1.1 * found.configured.samples_per_s
    assert found.one_more_worker.idle < 0.5
