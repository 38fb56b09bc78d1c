"""A whole run with a reward that hangs now and then: it completes, the reason is on record, no process is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from running import letters, start, trained_steps

from penstock.journal.reader import history

REWARD = '''
import os, time

def hangs(prompts, completions, **columns):
    """Once in fifty calls, wherever they are made."""
    with open({path!r}, "ab", buffering=0) as calls:
        calls.write(b".")
        number = calls.tell()
    if number % 50 == 20:
        time.sleep(600)
    return [float(len(completion) % 2) for completion in completions]
'''
REASON = b"reward function 'hangs' did not answer within 3 s"


@pytest.mark.timeout(300)
def test_a_reward_that_hangs_once_in_fifty_calls(folder: Path) -> None:
    (folder / "judged.py").write_text(REWARD.format(path=str(folder / "calls")))
    path = letters(folder, steps=20, run=f'extra_path = ["{folder}"]')
    env = 'name = "copy"\nrewards = ["judged:hangs"]\nreward_timeout_s = 3.0\n'
    path.write_text(path.read_text().replace('name = "copy"\n', env))
    run = start(folder, path)
    code, output = run.end(240)
    assert code == 0, output + run.logs()
    assert trained_steps(run.directory) == 20
    hung = (len((folder / "calls").read_bytes()) + 30) // 50
    assert hung >= 1
    told = sum(entry.body.count(REASON) for entry in history(run.directory / "journal.sqlite"))
    assert told == 4 * hung, "each sample of each such call is on record"
    assert f"failed {4 * hung}" in output

    def here(process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    assert not [process for process in psutil.process_iter() if here(process)]
