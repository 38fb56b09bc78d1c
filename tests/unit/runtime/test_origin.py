"""Which run directories were made by this user here."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime.origin import key_path
from penstock.runtime.rundir import RunDir, require_own_configuration


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "r", "a = 1\n", "0")


def copied(run: RunDir, to: Path) -> RunDir:
    shutil.copytree(run.root, to)
    return RunDir.open(to)


def test_a_run_is_its_makers_whatever_becomes_of_its_configuration(run: RunDir, tmp_path: Path):
    assert run.is_own
    run.config_path.write_text("a = 2\n")
    moved = run.root.rename(tmp_path / "moved")
    assert RunDir.open(moved).is_own
    assert key_path() == tmp_path / "state" / "penstock" / "origin.key"
    assert key_path().stat().st_mode & 0o077 == 0


def test_a_copy_is_its_makers_while_its_configuration_is_the_same(run: RunDir, tmp_path: Path):
    run.write_config("a = 2\n")
    copy = copied(run, tmp_path / "copy")
    assert copy.is_own
    copy.config_path.write_text("a = 3\n")
    assert not copy.is_own
    copy.write_config("a = 3\n")
    assert copy.is_own


def test_the_mark_of_another_user_counts_nothing(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    assert not run.is_own
    RunDir.create(tmp_path / "runs", "other", "", "0")
    assert not run.is_own
    with pytest.raises(
        ConfigError, match=r"made by another user or on another machine, and it would run\. Read .*--trust"
    ):
        run.require_own(False, "it would run")
    run.require_own(True, "it would run")


def test_the_mark_of_another_run_counts_nothing(run: RunDir, tmp_path: Path):
    other = RunDir.create(tmp_path / "runs", "other", "a = 1\n", "0")
    shutil.copy(run.root / "origin.json", other.root / "origin.json")
    assert not other.is_own


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"place": 5, "config": None}), json.dumps({"place": "é"})])
def test_a_damaged_mark_counts_nothing(text: str, run: RunDir):
    (run.root / "origin.json").write_text(text)
    assert not run.is_own


def test_a_key_that_others_could_read_counts_nothing(run: RunDir):
    key_path().chmod(0o644)
    assert not run.is_own


def test_where_no_key_can_be_kept_runs_are_made_and_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert not RunDir.create(tmp_path / "runs", "r", "", "0").is_own


def test_a_user_without_a_home_makes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def homeless(path: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert not RunDir.create(tmp_path / "runs", "r", "", "0").is_own


def test_a_copy_of_another_owner_is_foreign(run: RunDir, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    copy = copied(run, tmp_path / "copy")
    os.chown(copy.root, 12345, 12345)
    assert not copy.is_own


def test_only_the_configuration_of_a_run_has_an_origin(run: RunDir, tmp_path: Path):
    require_own_configuration(tmp_path / "mine.toml", False)
    require_own_configuration(run.config_path, False)
    (run.root / "origin.json").unlink()
    with pytest.raises(ConfigError, match="--trust"):
        require_own_configuration(run.config_path, False)
    require_own_configuration(run.config_path, True)
