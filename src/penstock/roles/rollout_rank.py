"""A rank of a rollout worker, other than rank 0: an engine, the five hooks and a ring, in lockstep with the others."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.config.devices import weights_stay_on_device
from penstock.engines.protocol import Engine
from penstock.errors import PenstockError
from penstock.payload.io.shm import Ring
from penstock.records.payload import RingAddress
from penstock.roles.environments import sample_bytes_of
from penstock.roles.process import RoleProcess
from penstock.roles.rollout_worker import build
from penstock.rollout.io.lockstep import Lockstep, RankCallbacks
from penstock.rollout.io.rank_fetch import Fetch, join
from penstock.rollout.io.rank_weights import RankWeights
from penstock.rollout.io.ranks import INTERRUPT, RankAssignment, ring_key
from penstock.rollout.io.worker_client import RingStore, watch_ring
from penstock.runtime.offload import Offload
from penstock.runtime.progress import ProgressCell
from penstock.runtime.ranks import file_store
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_of, gpu_count
from penstock.weights.io.transports import transport_of


async def main(process: RoleProcess) -> None:
    """Runs in lockstep until rank 0 ends the group. Rank 0 handles signals; this process dies with it."""
    signal.signal(INTERRUPT, signal.SIG_IGN)  # until there is something to interrupt
    seat = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankAssignment)
    process.progress = ProgressCell(seat.cell_fd)
    pipeline = process.pipeline
    torch.set_num_threads(pipeline.rollout.threads)
    working = Offload(1, "rank")
    process.progress.moved("building the model")
    environment, engine, workload, _ = await working.run(build, process, seat.rank)
    ring = Ring.create(
        process.run.run_id,
        capacity_bytes=pipeline.ring_bytes(sample_bytes_of(pipeline, environment)),
        slots=pipeline.ring_slots,
        guardian_pid=seat.guardian_pid,
    )
    try:
        with process.served(ring) as address:
            fetch = await working.run(_join_ranks, seat, address)
            await _run_lockstep(process, seat, engine, workload, ring, fetch, working)
    finally:
        # The trainer may still read the ring; the supervisor removes it at the end of the run.
        ring.close(unlink=False)


def _join_ranks(seat: RankAssignment, address: RingAddress) -> Fetch:
    store = file_store(Path(seat.store), seat.ranks)
    store.set(ring_key(seat.rank), msgspec.json.encode(address).decode())
    return join(store, rank=seat.rank, ranks=seat.ranks, timeout_s=seat.timeout_s)


async def _run_lockstep(
    process: RoleProcess,
    seat: RankAssignment,
    engine: Engine,
    workload: Any,
    ring: Ring,
    fetch: Fetch,
    working: Offload,
) -> None:
    pipeline = process.pipeline
    moved = process.progress.moved
    weights = RankWeights(engine, moved, Path(seat.newest))
    surroundings = RankCallbacks(
        wait_for_weights=weights.wait_for,
        announced=weights.announced,
        discard=ring.discard,
        rest=weights.rest,
        wake=weights.wake,
        progressed=moved,
    )
    lockstep = Lockstep(
        workload,
        RingStore(ring, moved),
        fetch,
        share=True,
        preparations=max(pipeline.rollout.preparations, pipeline.rollout.preparation_processes or 0),
        surroundings=surroundings,
    )
    updater = engine.updater(
        weights,
        weights.report,
        lambda: transport_of(
            process,
            pipeline.weights,
            process.config.payload.transport,
            device_of(pipeline.rollout.device),
            on_device=weights_stay_on_device(process.config, pipeline, gpu_count()),
        ),
        way=pipeline.weights.way,
        deadline_s=pipeline.weights.deadline_s,
    )
    weights.updating = lambda: updater.updating
    asyncio.get_running_loop().add_signal_handler(INTERRUPT, weights.interrupt)
    try:
        async with Tasks() as tasks:
            tasks.spawn("watch the loop", process.lag_monitor().run())
            tasks.spawn("watch the ring", watch_ring(ring))
            tasks.spawn("update weights", updater.run())
            await working.run(lockstep.run)
            tasks.cancel()
    except PenstockError as error:
        fetch.report_failure(error)  # the loop's own errors are reported already, and only the first report counts
        raise
