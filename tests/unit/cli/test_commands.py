"""What the commands say of runs that are over, and of commands themselves. Starts no process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli import run as running
from penstock.cli.inspect import doctor_command, story_command
from penstock.cli.main import app
from penstock.cli.run import attach_command, run_command
from penstock.config.load import dump, load
from penstock.errors import ConfigError, RunFailed
from penstock.launch.supervisor import exclusive
from penstock.runtime.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "demo", dump(load(ROOT / "examples" / "demo.toml")), "0")


def test_no_line_of_the_help_is_cut_off():
    result = CliRunner().invoke(app, ["--help"], terminal_width=80)
    assert result.exit_code == 0
    assert "..." not in result.output.partition("Commands:")[2]


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == penstock.__version__


def test_a_complete_run_is_not_started_again(run: RunDir, capsys: pytest.CaptureFixture[str]):
    run.write_ending("complete")
    assert run_command(None, [], resume=run.root, dry_run=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is complete: there is nothing to resume" in said
    assert "--set pipeline.letters.steps=" in said
    assert run.read_ending() is not None


def test_a_directory_that_is_neither_run_nor_model(tmp_path: Path):
    result = CliRunner().invoke(app, ["eval", str(tmp_path)])
    assert "neither a run directory (run.json) nor a model (config.json)" in str(result.exception)


def test_options_without_an_environment_are_refused(run: RunDir):
    result = CliRunner().invoke(app, ["eval", str(run.root), "--option", "length=8"])
    assert "--option is for the environment of --env" in str(result.exception)


def test_a_simulation_takes_no_configuration():
    result = CliRunner().invoke(app, ["simulate", "run.toml"])
    assert "--capacity predicts the throughput of run.toml" in str(result.exception)


def test_a_run_that_fails_says_where_its_logs_are(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: object) -> None:
        run.write_ending("failed")
        raise RunFailed("letters.trainer: the loss is not finite")

    monkeypatch.setattr(running, "_run", fails)
    with pytest.raises(RunFailed) as caught:
        run_command(None, [], resume=run.root, dry_run=False)
    first, *hints = caught.value.message.splitlines()
    assert first == "letters.trainer: the loss is not finite"
    assert hints == [f"logs: {run.root}/logs", f"once fixed, resume with: penstock run --resume {run.root}"]


def test_a_run_that_did_not_come_to_run_says_only_why(run: RunDir):
    with exclusive(run):
        with pytest.raises(ConfigError) as caught:
            run_command(None, [], resume=run.root, dry_run=False)
        assert run.lock_path.read_text() == str(os.getpid()), "`Run.stop` finds the supervisor by it"
    assert caught.value.message == f"{run.root} is being run by another process; stop that one first"


@pytest.mark.parametrize("how", ["complete", "interrupted", "failed"])
def test_the_doctor_of_a_run_that_is_over(run: RunDir, how: str, capsys: pytest.CaptureFixture[str]):
    run.write_ending(how, "the loss is not finite" if how == "failed" else "")  # type: ignore[arg-type]
    assert doctor_command(run.root) == 1
    said = capsys.readouterr().err
    assert f"the run has ended, no process can answer: {how}." in said
    assert ("--resume" in said) == (how != "complete")
    assert ("the loss is not finite" in said) == (how == "failed")


def test_a_run_of_this_machine_is_not_attached_to(run: RunDir):
    with pytest.raises(ConfigError, match="penstock dashboard"):
        attach_command(run.root, stop=False)


def test_a_story_asks_for_what_is_missing(run: RunDir):
    with pytest.raises(ConfigError, match="--pipeline letters or --pipeline cartpole"):
        story_command(run.root, "sample:17", None)
    with pytest.raises(ConfigError, match="expected sample:17"):
        story_command(run.root, "worker:17", None)


def test_capacity_needs_a_configuration():
    result = CliRunner().invoke(app, ["simulate", "--capacity"])
    assert isinstance(result.exception, ConfigError)
    assert "needs a configuration" in result.exception.message


@pytest.mark.parametrize("text", ["{", '{"host": "here"}', '{"host": "here", "port": "?", "pid": 1}'])
def test_the_doctor_of_a_run_whose_endpoint_is_damaged(run: RunDir, text: str):
    run.endpoint_path.write_text(text)
    with pytest.raises(ConfigError, match="cannot read the address of the controller"):
        doctor_command(run.root)
