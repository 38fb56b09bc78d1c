"""The token of a run: new at every start, private, and handed to each process once."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from penstock.errors import LocalProtocolError, RunFailed
from penstock.runtime.http_guard import bearer
from penstock.runtime.interpreter import python_command
from penstock.runtime.run_token import handed_over, new_token, receive, token_file
from penstock.runtime.rundir import RunDir

READS = "import sys; from penstock.runtime.run_token import receive; print(receive(int(sys.argv[1])))"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", "", "0")


def test_every_start_has_another_token(run: RunDir):
    seen = set()
    for _ in range(3):
        with run.with_new_token():
            seen.add(run.token())
            assert RunDir.open(run.root).token() == run.token(), "for the commands of this user"
    assert len(seen) == 3


def test_it_is_for_this_user_only_not_in_the_run_and_gone_after_it(run: RunDir, home: Path):
    with run.with_new_token():
        [kept] = home.rglob("tokens/*")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        assert not [path for path in run.root.rglob("*") if path.is_file() and run.token() in path.read_text()]
    assert not kept.exists()
    with pytest.raises(RunFailed, match="not live"):
        RunDir.open(run.root).token()


def test_a_copy_of_a_live_run_has_its_own(run: RunDir, tmp_path: Path):
    run.root.rename(tmp_path / "copy")
    copy = RunDir.open(tmp_path / "copy")
    with run.with_new_token(), copy.with_new_token():
        assert run.token() != copy.token()
        assert token_file(run.root, run.run_id).read_text() == run.token()


@pytest.mark.parametrize("text", ["", "  \n", "short", "é" * 43])
def test_one_that_could_be_guessed_is_refused(run: RunDir, text: str):
    path = token_file(run.root, run.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(RunFailed, match="token"):
        RunDir.open(run.root).token()
    with pytest.raises(RunFailed, match="at least 32"):
        run.hold_token(text)
    with handed_over("") as empty, pytest.raises(RunFailed, match="at least 32"):
        receive(os.dup(empty))


def test_a_server_without_a_token_does_not_start():
    with pytest.raises(LocalProtocolError, match="admit everyone"):
        bearer("")


def test_a_link_in_its_place_is_replaced_and_not_followed(run: RunDir, tmp_path: Path):
    (tmp_path / "mine").write_text("x" * 43)
    path = token_file(run.root, run.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(RunFailed, match="token"):
        RunDir.open(run.root).token()
    with run.with_new_token():
        assert not path.is_symlink()
    assert (tmp_path / "mine").read_text() == "x" * 43


def test_a_run_works_without_a_place_for_it(run: RunDir, home: Path, caplog: pytest.LogCaptureFixture):
    (home / "penstock" / "tokens").write_text("a file")
    with run.with_new_token():
        assert len(run.token()) > 32
    assert "could not be kept" in caplog.text


def test_a_process_receives_it_once_and_passes_it_to_nobody():
    token = new_token()
    with handed_over(token) as reader:
        said = subprocess.run(
            python_command("-c", READS, str(reader)), pass_fds=(reader,), capture_output=True, text=True, check=True
        )
    assert said.stdout.strip() == token
    with handed_over(token) as reader:
        own = os.dup(reader)
    assert receive(own) == token
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
