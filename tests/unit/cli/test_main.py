"""The command line: quick to answer, clear when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.inspect import parse_subject
from penstock.cli.run import check_command
from penstock.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def penstock(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands that are called here: a process for each would take most of the time."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_help_names_every_command():
    result = penstock("--help")
    assert result.returncode == 0
    for command in ("run", "check", "story", "doctor", "simulate", "bench"):
        assert f"\n  {command} " in result.stdout


def test_help_imports_nothing_heavy():
    program = (
        "import sys, penstock.cli.main\n"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'httpx', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Valid once the model is there, for the one that needs weights of its own, and the packages of the extras."""
    in_the_repository(monkeypatch)
    monkeypatch.setattr("penstock.config.check._check_packages", lambda config: None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    weights = [f"pipeline.sums.model.path={tmp_path}"] if example.stem.startswith("smollm2") else []
    assert check_command(example, weights) == 0
    assert "[[pipeline]]" in capsys.readouterr().out


def test_a_valid_example_exits_with_0():
    result = penstock("check", "examples/quickstart.toml")
    assert result.returncode == 0, result.stderr
    assert "[[pipeline]]" in result.stdout


def test_a_mistake_exits_with_2_and_names_the_key(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text((ROOT / "examples" / "quickstart.toml").read_text().replace("steps =", "stepz ="))
    result = penstock("check", path)
    assert result.returncode == 2
    assert "did you mean 'steps'?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pipeline.letters.env.name=copi", "did you mean 'copy'?"),
        ("pipeline.letters.env.options.lenght=3", "did you mean 'length'?"),
        ("pipeline.letters.train.advantage=no.such.module:f", "no.such"),
        ("pipeline.letters.train.advantage=gpro", "did you mean 'grpo'"),
        ('pipeline.letters.train.filters=["zero_sgnal"]', "did you mean 'zero_signal'"),
        ("pipeline.letters.rollout.workload=penstock:Nothing", "Nothing"),
    ],
)
def test_what_the_file_names_must_exist(override: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    in_the_repository(monkeypatch)
    with pytest.raises(ConfigError) as raised:
        check_command(Path("examples/quickstart.toml"), [override])
    assert expected in str(raised.value)


def test_run_needs_a_configuration_or_a_directory():
    result = penstock("run")
    assert result.returncode == 2
    assert "one of the two" in result.stderr


def test_a_dry_run_starts_nothing(tmp_path: Path):
    result = penstock("run", "examples/quickstart.toml", "--dry-run", "--set", f"run.dir={tmp_path}/runs")
    assert result.returncode == 0
    assert not (tmp_path / "runs").exists()


def test_bench_lists_what_there_is():
    result = penstock("bench")
    assert result.returncode == 0
    assert "payload" in result.stdout
    assert penstock("bench", "nothing").returncode == 2


@pytest.mark.slow
def test_simulate_runs_a_storm():
    result = penstock("simulate", "--steps", "10", "--faults", "1", "--seed", "3")
    assert result.returncode == 0, result.stderr
    assert "invariants" in result.stdout


@pytest.mark.slow
def test_simulate_lists_and_runs_scenarios():
    assert "buffer-one-short" in penstock("simulate", "--list").stdout
    result = penstock("simulate", "--scenario", "full-disk")
    assert result.returncode == 0, result.stderr
    assert "the disk is full" in " ".join(result.stdout.split())
    assert penstock("simulate", "--scenario", "nothing").returncode == 2


def test_doctor_of_a_directory_that_is_no_run(tmp_path: Path):
    assert penstock("doctor", tmp_path).returncode == 2


def test_subjects_of_stories():
    assert parse_subject("17") == ("sample", 17)
    assert parse_subject("version:6") == ("version", 6)
    for wrong in ("sample:x", "worker:1", ":", "sample:-1"):
        with pytest.raises(ConfigError):
            parse_subject(wrong)
