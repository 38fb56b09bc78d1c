import json
import stat
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.launch.supervisor import exclusive
from penstock.runtime.rundir import Endpoint, RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "demo", 'a = "b"\n', "0.1.0")


def test_a_run_directory_can_be_opened_again(run: RunDir):
    again = RunDir.open(run.root)
    assert again.run_id == run.run_id
    assert again.config_path.read_text() == 'a = "b"\n'


def test_two_runs_in_one_second_get_two_directories(tmp_path: Path):
    roots = {RunDir.create(tmp_path, "demo", "", "0").root for _ in range(5)}
    assert len(roots) == 5


def test_a_directory_that_is_no_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run\.json"):
        RunDir.open(tmp_path)


def test_the_folder_of_runs_is_answered_with_the_newest(run: RunDir, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"the newest is {run.root}"):
        RunDir.open(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        RunDir.open(tmp_path / "elsewhere")


def test_a_directory_of_another_format(run: RunDir):
    marker = run.root / "run.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99, "penstock": "9.9"}))
    with pytest.raises(ConfigError, match=r"made by Penstock 9\.9 in format 99"):
        RunDir.open(run.root)


def test_a_damaged_marker(run: RunDir):
    (run.root / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        RunDir.open(run.root)


def test_a_place_where_nothing_can_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"choose another run\.dir"):
        RunDir.create(tmp_path / "file", "demo", "", "0")


def test_the_endpoint_is_absent_until_announced(run: RunDir):
    assert run.read_endpoint() is None
    run.write_endpoint(Endpoint("127.0.0.1", 1234, 42))
    assert run.read_endpoint() == Endpoint("127.0.0.1", 1234, 42)


def test_a_failure_report(run: RunDir):
    assert run.read_failure("w") is None
    run.write_failure("w", "ConfigError", "no such model", 2)
    words = run.read_failure("w")
    assert words is not None
    assert words["message"] == "no such model"


def test_a_directory_of_another_is_not_adopted_when_all_names_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    for name in ("demo-now", *(f"demo-now-{count}" for count in range(2, 101))):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="its names are taken"):
        RunDir.create(tmp_path, "demo", "", "0")
    assert not list(tmp_path.glob("*/*"))


def test_the_lock_is_of_its_owner_only_and_no_link(run: RunDir, tmp_path: Path):
    with exclusive(run):
        assert stat.S_IMODE(run.lock_path.stat().st_mode) == 0o600
    (tmp_path / "other").write_text("kept")
    run.lock_path.unlink()
    run.lock_path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"), exclusive(run):
        raise AssertionError("it was locked")
    assert (tmp_path / "other").read_text() == "kept"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a b", "x" * 65])
def test_a_run_id_that_is_no_part_of_a_name(run_id: str, run: RunDir):
    marker = run.root / "run.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"run_id": run_id}))
    with pytest.raises(ConfigError, match="its run id is"):
        RunDir.open(run.root)
