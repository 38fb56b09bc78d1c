"""Whole runs with continuous batching: they train, converse, update weights, sleep and wake by order of the pool."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from running import start, step_lines

from penstock.journal.reader import history

ENVIRONMENT = '''
from penstock.envs.tasks import Copy


class Patient(Copy):
    """Asks again after every answer; the last one counts."""

    def reply(self, prompt, completions):
        return ">" if len(completions) < 3 else None
'''

PIPELINE = """
[[pipeline]]
name = "{name}"
steps = 8
train_devices = [{device}]
rollout_devices = [0, 1]
[pipeline.env]
name = "{env}"
[pipeline.model]
kind = "tiny"
hidden = 32
layers = 1
heads = 2
[pipeline.engine]
rows = 8
reread = {reread}
[pipeline.rollout]
group_size = 4
max_new_tokens = 4
max_turns = 3
top_p = 0.95
[pipeline.train]
groups_per_step = 4
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_requests_and_conversations_share_a_pool(folder: Path) -> None:
    (folder / "patience.py").write_text(ENVIRONMENT)
    path = folder / "run.toml"
    tables = [
        PIPELINE.format(name="plain", device=0, env="copy", reread="false"),
        PIPELINE.format(name="talks", device=1, env="patience:Patient", reread="true"),
    ]
    head = f'[run]\nname = "requests"\ndir = "{folder}/runs"\nextra_path = ["{folder}"]\n[pool]\ndevices = 2\n'
    path.write_text(head + "".join(tables))
    run = start(folder, path)
    code, output = run.end(300)
    assert code == 0, output + run.logs()
    for name in ("plain", "talks"):
        assert {entry["step"] for entry in step_lines(run.directory) if entry["pipeline"] == name} == set(range(8))
    events = (msgspec.msgpack.decode(entry.body) for entry in history(run.directory / "journal.sqlite"))
    happened = Counter(event["type"] for event in events)
    assert happened["pool_move_done"] > 4, "generation was put to sleep and woken"
