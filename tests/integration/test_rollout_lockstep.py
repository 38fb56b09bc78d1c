"""Several ranks as real processes with a real gloo group: lockstep, shared work, and ranks that raise or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RANKS = 2

RANK_SCRIPT = """
import asyncio, json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from penstock.errors import PenstockError
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished
from penstock.rollout.io.group import GroupRunner
from penstock.rollout.io.lockstep import Lockstep, RankCallbacks
from penstock.rollout.io.rank_fetch import join
from penstock.rollout.io.runner import RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.wire.messages import Delivered, Leased

options = json.loads(sys.argv[1])
rank, folder = options["rank"], Path(options["folder"])
fault = options["fault"] if rank == options["faulty_rank"] else ""
calls = []

class Workload:
    def strike(self, hook, prompt):
        calls.append((hook, prompt))
        if fault == hook and prompt == 5:
            (folder / "fault_fired").touch()
            raise ValueError(f"{hook} broke on purpose")
        if fault == f"die in {hook}" and prompt == 5:
            (folder / "fault_fired").touch()
            os.kill(os.getpid(), 9)
    def preflight(self): self.strike("preflight", 5)
    def prepare(self, lease):
        self.strike("prepare", lease.prompt)
        return lease
    def collate(self, prepared):
        for lease in prepared: self.strike("collate", lease.prompt)
        return list(prepared)
    def generate(self, batch):
        for lease in batch: self.strike("generate", lease.prompt)
        if options["engine_collective"]:
            dist.barrier()
        return [lease.prompt for lease in batch]
    def postprocess(self, prepared, generated):
        self.strike("postprocess", prepared.prompt)
        return [Finished({}, float(generated), 0, "", 1) for _ in prepared.samples]

class ControllerApi:
    issued = 0
    async def lease(self, samples, wait_s):
        leases = []
        while samples >= 2 and self.issued < options["prompts"]:
            leases.append(PromptLease(self.issued, 0, (2 * self.issued, 2 * self.issued + 1), (0, 1), 0))
            self.issued += 1
            samples -= 2
        prefetch = options["prefetch"] if self.issued < 6 else options["prefetch_later"]
        return Leased(tuple(leases), "granted" if leases else "exhausted", "running", prefetch=prefetch)
    async def deliver(self, rollouts, failures, returned, scores=()):
        with (folder / "delivered").open("a") as file:
            for one in rollouts: print(one.sample, file=file)
        with (folder / "failures").open("a") as file:
            for one in failures: print(one.sample, one.hook, file=file)
        (folder / "times").write_text(str([rollout.times.generate_s for rollout in rollouts]))
        return Delivered()

class Store:
    def write(self, arrays): return PayloadRef("x" * options["ring_name_bytes"], 0, 0, 0, 0, 0)
    def discard(self, payloads): pass

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.FileStore(str(folder / "store"), options["ranks"])
fetch = join(store, rank=rank, ranks=options["ranks"])
report = {"traces": []}
started = time.monotonic()
around = RankCallbacks(traced=lambda told: report["traces"].append(type(told).__name__))

async def lead():
    bounds = Bounds(batch_samples=4)
    group = GroupRunner(ControllerApi(), RunnerSettings(drain_s=10.0, bounds=bounds, prefetch=options["prefetch"]))
    lockstep = Lockstep(Workload(), Store(), fetch, leader=group, share=options["share"], surroundings=around)
    loop = asyncio.get_running_loop()
    stepping = loop.run_in_executor(None, lockstep.run)
    stepping.add_done_callback(lambda done: done.exception() and group.broke(done.exception()))
    await group.run()
    group.end()
    await stepping
    group.machine.check()
    report["statistics"] = group.statistics()

try:
    if rank == 0:
        asyncio.run(lead())
    else:
        Lockstep(Workload(), Store(), fetch, share=options["share"], surroundings=around).run()
except PenstockError as error:
    report |= {"error": type(error).__name__, "message": str(error)}
report["calls"] = calls
report["took_s"] = time.monotonic() - started
(folder / f"rank{rank}.json").write_text(json.dumps(report))
"""


def run_ranks(folder: Path, **options: Any) -> list[dict[str, Any]]:
    options = {
        "prompts": 12,
        "fault": "",
        "faulty_rank": 1,
        "share": False,
        "engine_collective": True,
        "ring_name_bytes": 4,
        "ranks": RANKS,
        "prefetch": True,
        "prefetch_later": None,
        "folder": str(folder),
        **options,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK_SCRIPT, json.dumps({**options, "rank": rank})], env=environment)
        for rank in range(RANKS)
    ]
    try:
        deadline = time.monotonic() + 100
        for process in ranks:
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return [
        json.loads(path.read_text()) if (path := folder / f"rank{rank}.json").exists() else {} for rank in range(RANKS)
    ]


def delivered(folder: Path) -> list[int]:
    path = folder / "delivered"
    return sorted(int(line) for line in path.read_text().split()) if path.exists() else []


def calls(report: dict[str, Any], hook: str) -> list[int]:
    return [prompt for name, prompt in report["calls"] if name == hook]


@pytest.mark.slow
def test_tensor_parallel_ranks_generate_everything_and_rank_0_delivers(tmp_path: Path) -> None:
    reports = run_ranks(tmp_path)
    assert [report.get("error") for report in reports] == [None, None]
    assert delivered(tmp_path) == list(range(24))
    for report in reports:
        assert calls(report, "generate") == list(range(12)), "every rank, every prompt, in the same order"
        assert {"GenerateEntered", "GenerateLeft", "BranchesTaken", "QueueSampled"} <= set(report["traces"])
    assert calls(reports[1], "postprocess") == []
    # One batch ahead: batch 1 (prompts 2 and 3) is handed to preparation before batch 0 is generated.
    assert len(calls(reports[0], "prepare")) == 12
    assert reports[0]["statistics"]["delivered_samples"] == 24


@pytest.mark.slow
def test_data_parallel_ranks_share_the_work_and_news_may_outgrow_the_frame(tmp_path: Path) -> None:
    options = {"share": True, "engine_collective": False, "ring_name_bytes": 40_000}
    reports = run_ranks(tmp_path, **options, prefetch=False, prefetch_later=True)
    assert [report.get("error") for report in reports] == [None, None]
    assert delivered(tmp_path) == list(range(24))
    assert calls(reports[0], "generate") == [0, 2, 4, 6, 8, 10]
    assert calls(reports[1], "generate") == [1, 3, 5, 7, 9, 11]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "faulty_rank"), [("preflight", 0), ("prepare", 1), ("collate", 0), ("generate", 0), ("generate", 1)]
)
def test_a_raising_rank_fails_the_group_quickly_with_its_error(tmp_path: Path, hook: str, faulty_rank: int) -> None:
    reports = run_ranks(tmp_path, fault=hook, faulty_rank=faulty_rank)
    assert (tmp_path / "fault_fired").exists()
    for report in reports:
        assert report["error"] == "RunFailed"
        assert f"{hook} broke on purpose" in report["message"]
    assert f"rank {faulty_rank}" in reports[1 - faulty_rank]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["prepare", "generate"])
@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_dying_rank_fails_the_group_quickly_and_is_named(tmp_path: Path, hook: str, faulty_rank: int) -> None:
    reports = run_ranks(tmp_path, fault=f"die in {hook}", faulty_rank=faulty_rank)
    assert (tmp_path / "fault_fired").exists()
    assert reports[faulty_rank] == {}
    survivor = reports[1 - faulty_rank]
    assert survivor["error"] == "PeerLost"
    assert f"rank {faulty_rank}" in survivor["message"]


@pytest.mark.slow
def test_a_failed_prompt_costs_that_prompt_when_work_is_shared(tmp_path: Path) -> None:
    reports = run_ranks(tmp_path, fault="prepare", faulty_rank=1, share=True, engine_collective=False)
    assert (tmp_path / "fault_fired").exists()
    assert [report.get("error") for report in reports] == [None, None]
    assert (tmp_path / "failures").read_text().splitlines() == ["10 prepare", "11 prepare"]
    assert delivered(tmp_path) == [sample for sample in range(24) if sample not in (10, 11)]
