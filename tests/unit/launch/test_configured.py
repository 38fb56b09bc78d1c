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
