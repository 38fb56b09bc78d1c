"""`penstock init`: every template is a configuration that passes `penstock check`, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.init import init_command
from penstock.config.check import check_environment
from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.roles.environments import environment_of


@pytest.mark.parametrize("template", ["letters", "chat", "gym", "agent"])
def test_a_template_is_a_valid_project(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    init_command(template, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "task", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(tmp_path / "run.toml")
    check_environment(config)
    environment = environment_of(config, config.pipeline[0])
    if template != "gym":
        assert environment.prompt(5) == environment.prompt(5)


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "run.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"has run\.toml already"):
        init_command("letters", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_an_unknown_template_names_the_known_ones(tmp_path: Path):
    with pytest.raises(ConfigError, match="'letters'"):
        init_command("leters", tmp_path)
