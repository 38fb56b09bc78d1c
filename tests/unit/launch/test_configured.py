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


def _fails(run: RunDir) -> ConfigError:
    run.write_ending("failed", "steps must be at least 240")
    return ConfigError("steps must be at least 240")


def test_a_complete_run_stays_complete_after_a_mistake(tmp_path: Path):
    run = RunDir.create(tmp_path, "run", "former", "0")
    run.write_ending("complete", wall_s=3.0)
    complete = run.read_ending()
    with pytest.raises(ConfigError), configured(run, "new"):
        raise _fails(run)
    assert run.read_ending() == complete
