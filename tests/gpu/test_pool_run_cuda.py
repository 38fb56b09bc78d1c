"""Two whole pipelines that train and generate on one GPU, in turn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from running import start, step_lines

from penstock.journal.reader import history

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

POOL = """\
[run]
name = "shared"
dir = "{folder}/runs"
[pool]
devices = 1
"""

PIPELINE = """
[[pipeline]]
name = "{name}"
steps = 3
[pipeline.env]
name = "copy"
[pipeline.model]
kind = "tiny"
hidden = 256
layers = 2
heads = 4
[pipeline.rollout]
workers = 1
group_size = 4
batch_samples = 16
max_new_tokens = 4
[pipeline.train]
groups_per_step = 4
[pipeline.token_loss]
kl_coefficient = 0.05
"""


@pytest.mark.timeout(170)
def test_two_pipelines_take_turns_on_one_gpu(folder: Path) -> None:
    config = folder / "run.toml"
    config.write_text(POOL.format(folder=folder) + PIPELINE.format(name="left") + PIPELINE.format(name="right"))
    run = start(folder, config)
    code, output = run.end(150)
    assert code == 0, output + run.logs()
    for name in ("left", "right"):
        assert {line["step"] for line in step_lines(run.directory) if line["pipeline"] == name} == {0, 1, 2}
    told = [msgspec.msgpack.decode(entry.body) for entry in history(run.directory / "journal.sqlite")]
    asked = [event for event in told if event["type"] == "pool_devices_requested"]
    assert {event["priority"] for event in asked} == {0, 1, 2}, "initialisation, training and scoring"
    assert not [event for event in told if event["type"] == "pool_move_failed"]
