"""`penstock.train` and `penstock.Run` without processes: what the keywords become, and how a run is looked at."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.load import dump, validate
from penstock.config.run import Config
from penstock.launch import python
from penstock.launch.supervisor import exclusive
from penstock.runtime.rundir import RunDir

REWARD = "penstock.envs.rewards:exact_answer"


class Created(Exception):
    """Raised instead of a start, with the configuration."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch):
    def created(config: Config, code: Any) -> RunDir:
        raise Created(config)

    def train(**keywords: Any) -> Config:
        with pytest.raises(Created) as started:
            penstock.train(**{"model": "tiny", "steps": 1} | keywords)
        return started.value.args[0]

    monkeypatch.setattr(python, "_created", created)
    return train


@pytest.mark.parametrize("environment", ["copy", {"name": "copy", "rewards": ["exact_answer"]}])
def test_named_arguments_are_added_to_the_tables_and_win(configured, environment: Any):
    env, run = {"name": "other", "reward_timeout_s": 30.0}, {"seed": 1, "name": "other"}
    config = configured(environment=environment, reward=REWARD, env=env, name="mine", run=run)
    [pipeline] = config.pipeline
    assert (pipeline.env.name, pipeline.env.rewards, pipeline.env.reward_timeout_s) == ("copy", [REWARD], 30.0)
    assert (config.run.name, config.run.seed) == ("mine", 1)
    assert env == {"name": "other", "reward_timeout_s": 30.0}


FILE = """\
[run]
extra_path = ["code"]
[[pipeline]]
name = "p"
steps = 1
[pipeline.env]
name = "jsonl"
options = { path = "rows.jsonl" }
"""


def test_paths_of_a_file_are_beside_it_and_others_in_the_working_directory(
    configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "project" / "code").mkdir(parents=True)
    (tmp_path / "project" / "rows.jsonl").touch()
    (tmp_path / "project" / "run.toml").write_text(FILE)
    (tmp_path / "weights").mkdir()
    (tmp_path / "more.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    config = configured(config="project/run.toml", model="weights")
    [pipeline] = config.pipeline
    assert config.run.extra_path == [tmp_path / "project" / "code"]
    assert pipeline.env.options["path"] == str(tmp_path / "project" / "rows.jsonl")
    assert pipeline.model.path == tmp_path / "weights"
    options = {"path": Path("more.jsonl")}
    [pipeline] = configured(environment={"name": "jsonl", "options": options}).pipeline
    assert pipeline.env.options["path"] == str(tmp_path / "more.jsonl")
    assert options == {"path": Path("more.jsonl")}


def test_looking_at_a_run_does_not_take_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = {"pipeline": [{"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}]}
    run = RunDir.create(tmp_path, "run", dump(validate(tree)), "0")
    run.write_ending("interrupted")
    with exclusive(run):
        assert penstock.Run(run.root).state == "running"

    def flock(*_: Any) -> None:
        raise AssertionError("a supervisor that starts now is refused")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert penstock.Run(run.root).state == "interrupted"
