"""Places that a run cannot use as it must: read-only, a file instead of a directory, too little shared memory, none.

Each is answered with one sentence, before anything starts where that is possible.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import letters, start, step_lines

pytestmark = pytest.mark.timeout(240)

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
OWN_MEMORY = 'mount -t tmpfs -o "$0" tmpfs /dev/shm && exec "$@"'


def with_shared_memory(folder: Path, options: str, *arguments: str | Path) -> tuple[int, str]:
    """A command whose processes have a /dev/shm of their own."""
    command = ["unshare", "--mount", "sh", "-c", OWN_MEMORY, options, *PENSTOCK, *map(str, arguments)]
    try:
        tried = subprocess.run([*command[:6], "true"], capture_output=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip("shared memory of its own needs root")
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_disk_that_became_read_only_is_a_sentence_and_can_still_be_read(folder: Path, disk: Path):
    config = letters(folder, steps=3)
    run = start(folder, config)
    assert run.end()[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, output = start(folder, "--resume", run.directory, "--set", "pipeline.letters.steps=5").end(60)
    assert code == 1, output
    assert "the file system is read-only" in output
    assert "Traceback" not in output
    code, output = start(folder, config).end(60)
    assert code == 2, output
    assert "cannot make the run directory" in output
    assert "Read-only file system" in output
    code, output = start(folder, run.directory, "step:1", command="story").end(60)
    assert code == 0, output


def test_a_file_where_a_directory_should_be(folder: Path):
    run = start(folder, letters(folder, steps=2, checkpoint_every=1))
    assert run.end()[0] == 0
    for name in ("logs", "weights"):
        kept = (run.directory / name).rename(run.directory / "aside")
        (run.directory / name).write_text("not a directory")
        code, output = start(folder, "--resume", run.directory, "--set", "pipeline.letters.steps=4").end(90)
        assert code == 1, output
        assert "Traceback" not in output
        assert f"{run.directory / name}" in output
        assert "; move it away" in output
        (run.directory / name).unlink()
        kept.rename(run.directory / name)


def test_a_file_where_runs_should_be(folder: Path):
    (folder / "runs").write_text("not a directory")
    code, output = start(folder, letters(folder)).end(60)
    (folder / "runs").unlink()
    assert code == 2, output
    assert "cannot make the run directory" in output
    assert "choose another run.dir" in output


def test_shared_memory_that_cannot_be_written_is_refused_before_anything_starts(folder: Path):
    config = letters(folder)
    for command in ("check", "run"):
        code, output = with_shared_memory(folder, "ro", command, config)
        assert code == 2, output
        assert "this user cannot create files in /dev/shm" in output
    assert not (folder / "runs").exists()


def test_a_step_that_shared_memory_cannot_hold_is_refused_before_anything_starts(folder: Path):
    large = ["--set", "pipeline.letters.train.groups_per_step=4000", "--set", "pipeline.letters.model.max_length=2048"]
    config = letters(folder, rollout="").read_text().replace("max_new_tokens = 4", "max_new_tokens = 1024")
    (folder / "run.toml").write_text(config)
    for command in ("check", "run"):
        code, output = with_shared_memory(folder, "size=64m", command, folder / "run.toml", *large)
        assert code == 2, output
        assert "a step of 16000 samples may take 140 MiB of shared memory, and /dev/shm has 64 MiB" in output
        assert "--shm-size" in output
    assert not (folder / "runs").exists()


def test_too_little_shared_memory_for_a_ring_is_a_sentence(folder: Path):
    code, output = with_shared_memory(folder, "size=64k", "run", letters(folder))
    assert code == 1, output
    assert "cannot create a payload ring" in output
    assert "Traceback" not in output


def test_little_shared_memory_is_enough_for_small_samples(folder: Path):
    """A ring takes memory as it is used, whatever its room is."""
    code, output = with_shared_memory(folder, "size=1m", "run", letters(folder, steps=6))
    assert code == 0, output
    (directory,) = (folder / "runs").iterdir()
    assert len(step_lines(directory)) == 6


def test_a_run_takes_no_more_disk_the_longer_it_is(folder: Path):
    """Versions and checkpoints that no process needs are removed; what grows are logs, metrics and the journal."""
    run = start(folder, letters(folder, steps=40, checkpoint_every=2))
    assert run.end()[0] == 0
    kept = sorted(path.name for path in (run.directory / "checkpoints" / "letters").glob("step-*"))
    assert kept == ["step-00000038", "step-00000040"]
    versions = list((run.directory / "weights").rglob("manifest.json"))
    assert 1 <= len(versions) <= 4, versions
    assert not [path for path in run.directory.rglob("*") if path.name.startswith(".writing")]
