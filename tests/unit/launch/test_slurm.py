"""Batch scripts for Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.launch.slurm import batch_script

CONFIG = Path(__file__).resolve().parents[3] / "examples" / "quickstart.toml"


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_script_is_bash_with_the_options_asked_for(nodes: int):
    script = batch_script(CONFIG, load(CONFIG), ["pipeline.letters.steps=3"], nodes=nodes, options=["--partition=gpu"])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert ("launch.kind=ray" in script) == (nodes > 1)
    assert ("ray start" in script) == (nodes > 1)


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        batch_script(CONFIG, load(CONFIG), nodes=0)
    with pytest.raises(ConfigError, match="on one node"):
        batch_script(CONFIG, load(CONFIG, ["launch.kind=ray"]), nodes=1)
