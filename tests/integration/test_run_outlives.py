"""A run outlives the terminal that shows it, and nothing that it started outlives the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import letters, start, step_lines
from test_bad_input import MINE, with_environment

from penstock.runtime.process import is_alive
from penstock.runtime.rundir import RunDir

pytestmark = pytest.mark.timeout(180)

DETACHED = (
    MINE
    + """
    def score(self, prompts, completions, **columns):
        import subprocess, sys
        from pathlib import Path
        mark = Path({folder!r}) / "left"
        if not mark.exists():
            # Detached as a daemon would be: a session of its own, and no parent.
            written = "open({left!r}, 'w').write(str(os.getpid()))"
            child = "import os, time; os.setsid(); os.fork() and os._exit(0); " + written + "; time.sleep(600)"
            subprocess.run([sys.executable, "-c", child])
        return super().score(prompts, completions, **columns)
"""
)


def test_a_closed_pipe_ends_nothing(folder: Path):
    """As `penstock run … | head` does."""
    run = start(folder, letters(folder, steps=8))
    assert run.process.stdout is not None
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(120) == 0
    ending = RunDir.open(run.directory).read_ending()
    assert ending is not None
    assert ending["how"] == "complete"
    assert len(step_lines(run.directory)) == 8


def test_a_terminal_that_hangs_up_ends_the_run_gracefully(folder: Path):
    run = start(folder, letters(folder, steps=10_000))
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGHUP)
    code, output = run.end()
    assert code == 130, output
    ending = RunDir.open(run.directory).read_ending()
    assert ending is not None
    assert ending["how"] == "interrupted"
    trained = len(step_lines(run.directory))
    again = start(folder, "--resume", run.directory, "--set", f"pipeline.letters.steps={trained + 3}")
    code, output = again.end()
    assert code == 0, output
    steps = [line["step"] for line in step_lines(run.directory)]
    assert steps == list(range(trained + 3))


def test_what_the_users_code_left_running_ends_with_the_run(folder: Path):
    left = folder / "left"
    source = DETACHED.format(folder=str(folder), left=str(left))
    run = start(folder, with_environment(folder, source, steps=3))
    code, output = run.end()
    assert code == 0, output
    assert not is_alive(int(left.read_text()))
    assert "left processes behind" in run.logs()


def test_brackets_and_escapes_are_only_text(folder: Path):
    source = MINE + "\n    def prompt(self, position):\n        raise ValueError('\\x1b[2J [/b] broken')\n"
    config = with_environment(folder, source, steps=3)
    odd = folder / "a [/b] place"
    odd.mkdir(parents=True)
    code, output = start(folder, config, "--set", f"run.dir={odd}").end()
    assert code == 2, output
    assert "\x1b" not in output
    assert "[/b] broken" in output
    assert str(odd) in output
    assert os.listdir(odd)
