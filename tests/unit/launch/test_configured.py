"""A resumed run may be given another configuration; one that cannot be is forgotten again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError, RunFailed
from penstock.launch.supervisor import configured
from penstock.runtime.rundir import RunDir


@pytest.mark.parametrize(("error", "kept"), [(ConfigError, "former"), (RunFailed, "new")])
def test_only_a_mistake_is_taken_back(tmp_path: Path, error: type[Exception], kept: str):
    run = RunDir.create(tmp_path, "run", "former", "0")
    with pytest.raises(error, match="new"), configured(run, "new"):
        raise error(run.config_path.read_text())
    assert run.config_path.read_text() == kept


def test_settings_that_were_trained_with_are_kept(tmp_path: Path):
    """For example if the user edits a reward during the run, and a worker that restarts cannot import it."""
    run = RunDir.create(tmp_path, "run", "former", "0")
    run.write_ending("complete", wall_s=3.0)
    run.metrics_path.write_text('{"kind":"step","pipeline":"p","step":2}\n')
    with pytest.raises(ConfigError), configured(run, "new"):
        raise _fails(run, '{"kind":"gauges"}\n{"kind":"step","pipeline":"p","step":3}\n')
    assert run.config_path.read_text() == "new"
    ending = run.read_ending()
    assert ending is not None
    assert ending["how"] == "failed"


def test_lines_without_a_step_are_no_training(tmp_path: Path):
    run = RunDir.create(tmp_path, "run", "former", "0")
    run.metrics_path.write_text('{"kind":"step","pipeline":"p","step":2}\n')
    with pytest.raises(ConfigError), configured(run, "new"):
        raise _fails(run, '{"kind":"gauges"}\n')
    assert run.config_path.read_text() == "former"


def _fails(run: RunDir, lines: str = "") -> ConfigError:
    with run.metrics_path.open("a") as metrics:
        metrics.write(lines)
    run.write_ending("failed", "steps must be at least 240")
    return ConfigError("steps must be at least 240")


def test_a_complete_run_stays_complete_after_a_mistake(tmp_path: Path):
    run = RunDir.create(tmp_path, "run", "former", "0")
    run.write_ending("complete", wall_s=3.0)
    complete = run.read_ending()
    with pytest.raises(ConfigError), configured(run, "new"):
        raise _fails(run)
    assert run.read_ending() == complete
