"""Weight updates: publishing, staged transfer, the pause that generation sees, and backlog.

For each size and number of replicas, each replica a process of its own that decodes all the time (a stack of linear
layers with one row: every step reads every weight once, as decoding does):

    publish      one version into the run directory           beside: the same tensors saved by the safetensors library
    transfer     bring, stage, prove (the updater's steps)     beside: one memcpy pass over the same bytes, warm memory
    pause        no decode step can run                        beside: a stop-the-world reload through the same engine
    backlog      versions waiting for a replica that is slower than the trainer

Ratios are taken within one run. On a GPU (`--device cuda`) weights are bfloat16 and go from the trainer's device memory
to the replica's, proved on the device; the copy beside is one within the device; the way by the host is shown too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from penstock.engines.serving import Serving
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io.device import DeviceExport, DeviceTransport
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater

UPDATES = 24
TRANSFERS = 9
DEADLINE_S = 300.0


def model(size_mb: int, seed: int, device: str) -> nn.Module:
    """About `size_mb` megabytes in square layers of at most 16 MB: float32, or bfloat16 on a GPU."""
    dtype, element_bytes = (torch.float32, 4) if device == "cpu" else (torch.bfloat16, 2)
    width = 256 if size_mb <= 4 else 1024 if size_mb <= 300 else 2048
    layers = max(1, round(size_mb * 1e6 / (element_bytes * width * width)))
    torch.manual_seed(seed)
    stack = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)))
    return stack.requires_grad_(False)


def transport_for(run_dir: Path, device: str) -> FileTransport | DeviceTransport:
    files = FileTransport(run_dir)
    return files if device == "cpu" else DeviceTransport(run_dir, torch.device(device), files)


def proof(transport: FileTransport | DeviceTransport, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> str:
    """As the updater proves delivery."""
    return transport.delivered(manifest, staged) if isinstance(transport, DeviceTransport) else digest_of(staged)


def size_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module_tensors(module).values())


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Decoding:
    """Decodes in a thread and notes when each step ended."""

    def __init__(self, engine: Serving, device: str) -> None:
        self.engine, self.device = engine, device
        self.ended: list[float] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        weight = next(self.engine.module.parameters())
        row = torch.ones(1, weight.shape[1], device=self.device, dtype=weight.dtype)
        with torch.inference_mode():
            while not self.stop.is_set():
                with self.engine.step():
                    self.engine.module(row)
                    synchronize(self.device)
                self.ended.append(time.perf_counter())

    @contextlib.contextmanager
    def running(self) -> Iterator[Decoding]:
        self.thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            self.thread.join(DEADLINE_S)

    def wait_steps(self, count: int) -> None:
        target, deadline = len(self.ended) + count, time.monotonic() + DEADLINE_S
        while len(self.ended) < target and time.monotonic() < deadline:
            time.sleep(0.0005)

    def step_s(self) -> float:
        gaps = [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)]
        return statistics.median(gaps)


class CopyPass:
    """Copies all weights once, within the memory they are served from, into warm memory."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.device = device
        self.source = [tensor.clone() for tensor in module_tensors(module).values()]
        self.target = [tensor.clone() for tensor in self.source]

    def seconds(self) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for to, tensor in zip(self.target, self.source, strict=True):
            to.copy_(tensor)
        synchronize(self.device)
        return time.perf_counter() - began


def replica(
    pipe: Connection, barrier: Any, run_dir: Path, manifests: list[Manifest], size_mb: int, device: str, updates: int
) -> None:
    """One replica: measures in step with the others, and sends what it measured."""
    torch.set_num_threads(1)
    engine = Serving(model(size_mb, 99, device))
    transport = transport_for(run_dir, device)
    copying = CopyPass(engine.module, device)
    for manifest in manifests:  # the second buffer is in use from the first update on
        engine.stage(transport.fetch(manifest, DEADLINE_S))
        engine.swap(manifest.version, manifest.digest, DEADLINE_S)

    def staged(manifest: Manifest) -> tuple[float, float]:
        began = time.perf_counter()
        engine.stage(transport.fetch(manifest, DEADLINE_S, verify=False))
        assert proof(transport, manifest, engine.staged_tensors()) == manifest.digest
        synchronize(device)
        transferred = time.perf_counter() - began
        return transferred, engine.swap(manifest.version, manifest.digest, DEADLINE_S)

    barrier.wait(DEADLINE_S)
    transfers: list[float] = []
    copies: list[float] = []
    for turn in range(TRANSFERS):  # by turns, so that whatever else the machine does hits both
        copies.append(copying.seconds())
        transfers.append(staged(manifests[turn % len(manifests)])[0])
    del copying
    by_host: list[float] = []
    files = FileTransport(run_dir)
    for turn in range(0 if device == "cpu" else 3):
        began = time.perf_counter()
        engine.stage(files.fetch(manifests[turn % len(manifests)], DEADLINE_S, verify=False))
        assert digest_of(engine.staged_tensors()) == manifests[turn % len(manifests)].digest
        by_host.append(time.perf_counter() - began)
    barrier.wait(DEADLINE_S)
    pauses: list[float] = []
    decoding = Decoding(engine, device)
    with decoding.running():
        decoding.wait_steps(20)
        for turn in range(updates):
            pauses.append(staged(manifests[turn % len(manifests)])[1])
            decoding.wait_steps(3)
        worlds: list[float] = []
        for turn in range(max(3, updates // 4)):
            manifest = manifests[turn % len(manifests)]
            began = time.perf_counter()
            engine.sleep(DEADLINE_S)
            engine.load_in_place(transport.fetch(manifest, DEADLINE_S), manifest.version, manifest.digest, DEADLINE_S)
            assert digest_of(engine.served_tensors()) == manifest.digest
            engine.wake(DEADLINE_S)
            worlds.append(time.perf_counter() - began)
            decoding.wait_steps(3)
    pipe.send(
        {
            "memcpy_s": statistics.median(copies),
            "transfer_s": statistics.median(transfers),
            "by_host_s": statistics.median(by_host) if by_host else None,
            "off_the_device": transport.fallbacks if isinstance(transport, DeviceTransport) else 0,
            "pauses_s": pauses,
            "worlds_s": worlds,
            "step_s": decoding.step_s(),
        }
    )


class Announced:
    """A source that announces prepared versions on a timetable, whatever the replica does."""

    def __init__(self, manifests: list[Manifest], every_s: float, count: int) -> None:
        self.manifests, self.every_s, self.count = manifests, every_s, count
        self.began = time.perf_counter()

    @property
    def newest(self) -> int:
        return min(self.count - 1, int((time.perf_counter() - self.began) / self.every_s))

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        deadline = time.perf_counter() + wait_s
        while time.perf_counter() < deadline:
            newest = self.newest
            manifest = msgspec.structs.replace(self.manifests[newest % len(self.manifests)], version=Version(newest))
            if manifest.held != held:
                return manifest
            await asyncio.sleep(self.every_s / 2)
        return None


async def backlog(run_dir: Path, manifests: list[Manifest], size_mb: int, device: str) -> dict[str, float]:
    """A trainer that publishes about four times as fast as the replica can load."""
    engine = Serving(model(size_mb, 99, device))
    transport = transport_for(run_dir, device)
    load_s = 0.0
    for _ in range(2):  # the second time in warm memory
        began = time.perf_counter()
        for manifest in manifests:
            engine.stage(transport.fetch(manifest, DEADLINE_S))
            engine.swap(manifest.version, manifest.digest)
        load_s = (time.perf_counter() - began) / len(manifests)
    source = Announced(manifests, load_s / 4, 60)
    behind: list[int] = []
    finished = asyncio.Event()

    async def report(message: ReplicaReport) -> None:
        if message.state == "serving" and not message.error:
            behind.append(source.newest - message.version)
            if message.version >= source.count - 1:
                finished.set()

    updater = ReplicaUpdater(engine, source, report, transport, way="staged", poll_s=1.0)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        task = group.create_task(updater.run())
        await finished.wait()
        task.cancel()
    return {
        "announced": source.count,
        "loaded": updater.statistics.updates,
        "skipped": updater.statistics.skipped_versions,
        "behind_at_end": behind[-1],
        "behind_mean": statistics.mean(behind),
    }


def published(
    run_dir: Path, size_mb: int, versions: int, device: str, export: DeviceExport
) -> tuple[list[Manifest], float, float]:
    """Prepared versions, and the seconds to publish one, by us and by the safetensors library."""
    publisher = Publisher(run_dir, "bench", keep=versions + 4)
    models = [module_tensors(model(size_mb, seed, device)) for seed in range(versions)]
    manifests: list[Manifest] = []
    ours: list[float] = []
    for version, tensors in enumerate(models):
        began = time.perf_counter()
        manifests.append(publisher.publish(Version(version), tensors))
        kept = export.offer(manifests[-1], tensors)
        assert kept or device == "cpu", "the device's memory cannot be shared"
        ours.append(time.perf_counter() - began)
    theirs: list[float] = []
    for number, tensors in enumerate(models):
        path = run_dir / f"peer{number}"
        began = time.perf_counter()
        safetensors.torch.save_file(tensors, path)
        theirs.append(time.perf_counter() - began)
        path.unlink()
    return manifests, min(ours), min(theirs)


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def measure(size_mb: int, replicas: int, device: str, updates: int, directory: Path) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=directory) as text:
        run_dir = Path(text)
        export = DeviceExport(run_dir, slots=3)
        manifests, ours_s, theirs_s = published(run_dir, size_mb, 3, device, export)
        barrier = context.Barrier(replicas)
        pipes, processes = [], []
        for _ in range(replicas):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, barrier, run_dir, manifests, size_mb, device, updates)
            process = context.Process(target=replica, args=arguments, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(DEADLINE_S)
        # A process cannot open its own device memory, so this would go through the host on a GPU.
        alone = replicas == 1 and device == "cpu"
        late = asyncio.run(backlog(run_dir, manifests, size_mb, device)) if alone else None
    size = size_bytes(model(size_mb, 0, device))
    where = f"{size_mb} MB x{replicas}"
    memcpy_s = statistics.median(one["memcpy_s"] for one in found)
    transfer_s = statistics.median(one["transfer_s"] for one in found)
    pauses = [pause for one in found for pause in one["pauses_s"]]
    worlds = [pause for one in found for pause in one["worlds_s"]]
    step_s = statistics.median(one["step_s"] for one in found)
    copy = "memcpy pass" if device == "cpu" else "device to device copy"
    rows = [
        row(f"transfer {where}", "GB/s", size / transfer_s / 1e9, size / memcpy_s / 1e9, copy),
        row(f"pause p50 {where}", "ms", 1e3 * quantile(pauses, 0.5), 1e3 * quantile(worlds, 0.5), "stop the world"),
        row(f"pause p99 {where}", "ms", 1e3 * quantile(pauses, 0.99), 1e3 * quantile(worlds, 0.99), "stop the world"),
        row(f"pause p50 {where}", "decode steps", quantile(pauses, 0.5) / step_s, 1.0, "one decode step"),
        row(f"pause p99 {where}", "decode steps", quantile(pauses, 0.99) / step_s, 1.0, "one decode step"),
    ]
    if device != "cpu":
        assert not any(one["off_the_device"] for one in found), "a transfer went through the host"
        host_s = statistics.median(one["by_host_s"] for one in found)
        rows.insert(1, row(f"through the host {where}", "GB/s", size / host_s / 1e9, size / memcpy_s / 1e9, copy))
    if replicas == 1:
        rows.insert(0, row(f"publish {where}", "ms", 1e3 * ours_s, 1e3 * theirs_s, "safetensors.save_file"))
    if late is not None:
        rows.append(row(f"backlog at the end {where}", "versions", late["behind_at_end"], 0.0, "none"))
        rows.append(
            row(f"behind while loading {where}", "versions", late["behind_mean"], late["announced"], "announced")
        )
        rows.append(row(f"skipped {where}", "versions", late["skipped"], late["announced"], "announced"))
    return rows


def row(name: str, unit: str, ours: float, peer: float, peer_name: str) -> dict[str, Any]:
    ratio = ours / peer if peer else None
    return {"name": name, "unit": unit, "ours": ours, "peer": peer, "peer_name": peer_name, "ratio": ratio}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="weights", description="Weight updates: publishing, transfer, pause, backlog."
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="1 and 100 MB, one replica")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes-mb", type=int, nargs="*")
    parser.add_argument("--replicas", type=int, nargs="*")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="where versions are written"
    )
    options = parser.parse_args(argv)
    full = [1, 100, 1000] if options.device == "cpu" else [270, 3000]  # 135 million and 1.5 billion parameters
    sizes = options.sizes_mb or (full[:2] if options.quick else full)
    counts = options.replicas or ([1] if options.quick or options.device != "cpu" else [1, 4])
    torch.set_num_threads(1)
    table = Table(title=f"weight updates on {options.device}")
    for heading in ("measure", "ours", "beside", "", "ratio"):
        table.add_column(heading, justify="left" if heading in ("measure", "") else "right")
    rows: list[dict[str, Any]] = []
    for size_mb in sizes:
        for replicas in counts:
            fresh = measure(size_mb, replicas, options.device, 8 if options.quick else UPDATES, options.directory)
            rows.extend(fresh)
            for one in fresh:
                ratio = "" if one["ratio"] is None else f"{one['ratio']:.3f}"
                table.add_row(
                    one["name"], f"{one['ours']:.3f} {one['unit']}", f"{one['peer']:.3f}", one["peer_name"], ratio
                )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
