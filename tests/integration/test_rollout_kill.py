"""A worker killed in each hook: what it had not delivered is done by the next one, and nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER_SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.wire.messages import Delivered, Leased

options = json.loads(sys.argv[1])
folder = Path(options["folder"])

def strike(hook, prompt):
    if hook == options["kill_in"] and prompt == 6:
        (folder / "fault_fired").touch()
        os.kill(os.getpid(), 9)

class Workload:
    def preflight(self): strike("preflight", 6)
    def prepare(self, lease):
        strike("prepare", lease.prompt)
        return lease
    def collate(self, prepared):
        for lease in prepared: strike("collate", lease.prompt)
        return prepared
    def generate(self, batch):
        for lease in batch: strike("generate", lease.prompt)
        return batch
    def postprocess(self, prepared, generated):
        strike("postprocess", prepared.prompt)
        return [Finished({}, 0.0, 0, "", 1) for _ in prepared.samples]

class ControllerApi:
    '''Issues what no earlier worker delivered: the file is what a controller's journal would know.'''
    def __init__(self):
        path = folder / "delivered"
        done = set(map(int, path.read_text().split())) if path.exists() else set()
        self.open = [prompt for prompt in range(16) if 2 * prompt not in done]
    async def lease(self, samples, wait_s):
        count = samples // 2
        taken, self.open = self.open[:count], self.open[count:]
        leases = tuple(PromptLease(prompt, 0, (2 * prompt, 2 * prompt + 1), (0, 1), 0) for prompt in taken)
        return Leased(leases, "granted" if leases else "exhausted", "running")
    async def deliver(self, rollouts, failures, returned, scores=()):
        assert not failures, failures
        with (folder / "delivered").open("a") as file:
            file.write("".join(f"{one.sample}\\n" for one in rollouts))
        return Delivered()

class Store:
    def write(self, arrays):
        strike("store", 6 if (folder / "delivered").exists() else 0)
        return PayloadRef("ring", 0, 0, 0, 0, 0)
    def discard(self, payloads): pass

bounds = Bounds(batch_samples=4, queue_samples=8)
settings = RunnerSettings(drain_s=10.0, bounds=bounds, prefetch=options["prefetch"])
print(asyncio.run(Runner(Workload(), ControllerApi(), Store(), settings).run()))
"""


def run_worker(folder: Path, kill_in: str, prefetch: bool) -> int:
    options = json.dumps({"folder": str(folder), "kill_in": kill_in, "prefetch": prefetch})
    command = [sys.executable, "-c", WORKER_SCRIPT, options]
    return subprocess.run(command, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("hook", ["preflight", "prepare", "collate", "generate", "postprocess", "store"])
def test_a_killed_workers_samples_are_made_by_the_next(tmp_path: Path, hook: str, prefetch: bool) -> None:
    assert run_worker(tmp_path, hook, prefetch) == -signal.SIGKILL
    assert (tmp_path / "fault_fired").exists()
    path = tmp_path / "delivered"
    before = [int(line) for line in path.read_text().split()] if path.exists() else []
    assert len(before) < 32
    assert run_worker(tmp_path, "", prefetch) == 0
    assert sorted(int(line) for line in path.read_text().split()) == list(range(32)), "each exactly once"
