"""What the controller decides about a whole fleet and about the trainer is carried out, in a real run."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from running import Running, letters, start, trained_steps, wait_for

from penstock.journal.reader import history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DAMAGED_FROM = 5

DAMAGING = f"""
import os
from pathlib import Path
from penstock.envs.tasks import Copy
from penstock.weights.io import files

class Mine(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed)

publish = files.Publisher.publish

def damaging(self, version, tensors, *, durable=False, **options):
    manifest = publish(self, version, tensors, durable=durable, **options)
    witness = Path(__file__).with_name("witness")
    if version < {DAMAGED_FROM} or (witness.with_name("healed")).exists():
        return manifest
    if durable:
        witness.with_name("healed").write_text(str(version))
        return manifest
    path = self._run_dir / manifest.directory / manifest.buckets[0].file
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with witness.open("a") as file:
        file.write(f"{{version}}\\n")
    return manifest

files.Publisher.publish = damaging
"""

FAILING = (
    DAMAGING.replace("last[0] ^ 1", "last[0]")
    + f"""
fetch = files.FileTransport.fetch

def failing(self, manifest, timeout_s, **options):
    if manifest.version >= {DAMAGED_FROM} and not Path(__file__).with_name("healed").exists():
        raise RuntimeError("it cannot be loaded")
    return fetch(self, manifest, timeout_s, **options)

files.FileTransport.fetch = failing
"""
)


def log_of(run: Running, name: str) -> str:
    path = run.directory / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("code", [DAMAGING, FAILING], ids=["damaged", "failing"])
def test_a_version_that_no_worker_can_load_is_published_afresh(folder: Path, code: str):
    """Workers wait for a damaged one; where loading fails for no known reason, they are restarted all together."""
    restarts = code is FAILING
    (folder / "mine.py").write_text(code)
    config = letters(
        folder, steps=12, run=f'extra_path = ["{folder}"]', rollout="workers = 2", checkpoint_every=DAMAGED_FROM - 1
    )
    config.write_text(config.read_text().replace('name = "copy"', 'name = "mine:Mine"'))
    run = start(folder, config)
    status, output = run.end(240)
    assert (folder / "witness").exists(), "no version was damaged"
    assert status == 0, output + run.logs()
    assert trained_steps(run.directory) == 12
    controller, saved = log_of(run, "controller"), log_of(run, "letters.trainer")
    assert ("no new prompts are issued" in controller) is restarts
    assert (f"all replicas are restarted, from version {DAMAGED_FROM - 1}" in controller) is restarts
    assert ("a replica serves again" in controller) is restarts
    assert restarts or "must save a checkpoint: fetch: weights file bucket-00000.safetensors is not" in controller
    assert "saving an emergency checkpoint" in saved
    assert saved.count("training letters from step") == 1, "the trainer went on"
    healed = int((folder / "healed").read_text())
    events = [msgspec.msgpack.decode(entry.body) for entry in history(run.directory / "journal.sqlite")]
    assert any(event["type"] == "ack_checkpoint" and event["step"] == healed for event in events)
    for name in ("letters.rollout.0", "letters.rollout.1"):
        log = log_of(run, name)
        assert len(re.findall("registered as", log)) == 1 + restarts, log


def test_a_trainer_that_hangs_is_killed_and_restarted_from_its_checkpoint(folder: Path):
    extra = "[control]\nwedged_after_s = 10\n"
    run = start(folder, letters(folder, steps=60, checkpoint_every=2, extra=extra))
    run.wait_for_step(4)
    trainer = run.child("letters.trainer")
    trainer.send_signal(signal.SIGSTOP)
    wait_for(lambda: trainer.status() == psutil.STATUS_STOPPED, 30, "the trainer to stand still")
    wait_for(lambda: not trainer.is_running() or run.process.poll() is not None, 120, "the trainer to be ended")
    code, output = run.end(240)
    assert code == 0, output + run.logs()
    assert trained_steps(run.directory) == 60
    assert "the trainer is restarted from its checkpoint: no progress for" in log_of(run, "controller")
    assert "letters.trainer ended (killed by SIGKILL)" in output
    starts = re.findall(r"training letters from step (\d+), lineage (\w+)", log_of(run, "letters.trainer"))
    assert int(starts[1][0]) >= 2, "it began with its checkpoint"
    assert starts[0][1] != starts[1][1], "a new lineage"
