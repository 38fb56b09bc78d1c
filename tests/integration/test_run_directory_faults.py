"""What people do to a run directory: delete it, copy it, damage it, take its token. Each has its sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import letters, start, step_lines, trained_steps, wait_for

from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.ring import NAME_PREFIX
from penstock.runtime.rundir import RunDir

pytestmark = pytest.mark.timeout(180)


def test_a_journal_that_is_deleted_under_a_live_controller_stops_the_run(folder: Path):
    run = start(folder, letters(folder, steps=10_000))
    run.wait_for_step(1)
    for file in run.directory.glob("journal.sqlite*"):
        file.unlink()
    code, output = run.end(60)
    assert code == 1, output
    assert "was deleted or replaced during the run" in output
    assert "model.path" in output
    ending = RunDir.open(run.directory).read_ending()
    assert ending is not None
    assert "was deleted or replaced" in ending["sentence"]


def test_a_run_directory_that_is_deleted_ends_the_run_in_one_sentence(folder: Path):
    run = start(folder, letters(folder, steps=10_000))
    run.wait_for_step(1)
    directory = run.directory
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    code, output = run.end(60)
    assert code == 1, output
    assert f"the run directory {directory} was deleted" in output
    assert "--resume" not in output
    assert "Traceback" not in output


def test_a_damaged_journal_is_named_when_the_run_is_resumed(folder: Path):
    run = start(folder, letters(folder, steps=3))
    assert run.end()[0] == 0
    journal = run.directory / "journal.sqlite"
    body = bytearray(journal.read_bytes())
    middle = body.rindex(b"ack_step")
    body[middle] ^= 1
    journal.write_bytes(body)
    code, output = start(folder, "--resume", run.directory, "--set", "pipeline.letters.steps=5").end()
    assert code == 1, output
    assert "is damaged: events" in output
    assert "checksum" in output


def test_a_copy_of_a_live_run_leaves_the_original_alone(folder: Path):
    run = start(folder, letters(folder, steps=10_000))
    run.wait_for_step(1)
    mapped = {one.path for one in run.child("letters.rollout.0").memory_maps()}
    rings = {path for path in Path(DIRECTORY).glob("penstock*") if str(path) in mapped}
    assert rings
    copied = folder / "copied"
    shutil.copytree(run.directory, copied, ignore=shutil.ignore_patterns("*.tmp", ".writing*"))
    copy = start(folder, "--resume", copied, "--set", "pipeline.letters.steps=1")
    copy.end(90)
    assert rings <= set(Path(DIRECTORY).glob("penstock*"))
    trained = len(step_lines(run.directory))
    wait_for(lambda: len(step_lines(run.directory)) > trained + 2, 60)
    run.interrupt()
    assert run.end()[0] == 130


def test_too_few_open_files_are_a_sentence(folder: Path):
    command = [sys.executable, "-m", "penstock.cli.main", "run", str(letters(folder, steps=3))]
    # The limit is set in the child: here it would depend on how many files the test process has open.
    limited = ["sh", "-c", 'ulimit -n 24 && exec "$@"', "sh", *command]
    ended = subprocess.run(limited, cwd=folder, capture_output=True, text=True, timeout=120)
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "Traceback" not in output
    assert "open files" in output


def test_a_worker_whose_ring_is_deleted_is_replaced(folder: Path):
    run = start(folder, letters(folder, steps=10_000, rollout="workers = 2"))
    run.wait_for_step(2)
    worker = run.child("letters.rollout.0")
    rings = [Path(one.path) for one in worker.memory_maps() if one.path.startswith(f"{DIRECTORY}/{NAME_PREFIX}")]
    assert rings
    for ring in rings:
        ring.unlink()
    wait_for(lambda: not worker.is_running(), 30, "the worker to be replaced")
    run.child("letters.rollout.0")
    run.wait_for_step(trained_steps(run.directory) + 2)
    run.interrupt()
    code, output = run.end()
    assert code == 130, output + run.logs()
    assert "was deleted or moved; this worker must be replaced" in output
