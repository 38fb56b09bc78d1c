"""The dashboard on a day-long run: how long until all is read, what a refresh costs, and in how much memory.

A synthetic run directory: a million lines of metrics (half of them steps, half gauges) and a journal of two hundred
thousand events. Beside each figure, in the same run: reading the same bytes once (the physical limit), and decoding
every line and event once and doing nothing with them (the limit for any reader).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from penstock.dashboard.io.answers import answer
from penstock.dashboard.io.run_reader import RunReader
from penstock.journal.reader import history
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName
from penstock.runtime.rundir import RunDir

CONFIG = '[[pipeline]]\nname = "p"\nsteps = 500000\n'
BEGAN_AT = 1.7e9
GROUP = 4
VIEWS = {
    "overview": {},
    "flow": {"pipeline": "p"},
    "weights": {"pipeline": "p"},
    "loops": {},
    "pool": {},
    "troubles": {},
}
STEP_METRICS = (
    "loss",
    "entropy",
    "kl_sampling",
    "ratio_mean",
    "clip_fraction",
    "grad_norm",
    "step_s",
    "wait_s",
    "turn_s",
)
PIPELINE_GAUGES = ("in_flight", "samples_trained", "samples_leased", "samples_buffered", "workers_alive", "throttled")
PROCESS_GAUGES = ("loop_lag_p50_s", "loop_lag_p99_s", "loop_lag_max_s", "weights_last_pause_s")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench dashboard", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A twentieth of the size.")
    parser.add_argument("--json", type=Path, help="Write the figures there too.")
    options = parser.parse_args(argv)
    scale = 20 if options.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder), "long", CONFIG, "benchmark")
        write_metrics(run, 1_000_000 // scale)
        write_journal(run, 200_000 // scale)
        rows = measure(run)
    table = Table(title=f"{1_000_000 // scale:,} lines of metrics, {200_000 // scale:,} events", title_justify="left")
    for column in ("what", "dashboard", "beside it", "", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            _shown(row["ours"], row["unit"]),
            _shown(row["peer"], row["unit"]),
            row["peer_name"],
            f"{row['ratio']:.2f}",
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


def measure(run: RunDir) -> list[dict]:
    files = [run.metrics_path, run.journal_path]
    read_s = timed(lambda: [sum(len(chunk) for chunk in _chunks(path)) for path in files])
    decode_s = timed(lambda: _decode_all(run))
    memory = psutil.Process().memory_info
    before = memory().rss
    reader = RunReader(run.root)
    first_s = timed(lambda: (reader.refresh(0.5), answer(reader, "overview", {})))
    all_s = first_s + timed(lambda: _catch_up(reader))
    grown = memory().rss - before
    views_s = timed(lambda: [answer(reader, view, query) for view, query in VIEWS.items()]) / len(VIEWS)
    refreshes = []
    for number in range(20):
        line = next(metric_lines(2, first=10_000_000 + number))
        with run.metrics_path.open("ab") as file:
            file.write(line)
        refreshes.append(timed(lambda: (reader.refresh(0.5), answer(reader, "overview", {}))))
    largest = max(len(orjson.dumps(answer(reader, view, query))) for view, query in VIEWS.items())
    size = sum(path.stat().st_size for path in files)
    return [
        _row("first answer", "s", first_s, decode_s, "decoding everything once"),
        _row("all is read", "s", all_s, decode_s, "decoding everything once"),
        _row("all is read", "s", all_s, read_s, "reading the bytes once"),
        _row("one view, nothing new", "s", views_s, decode_s, "decoding everything once"),
        _row(
            "refresh after one more line",
            "s",
            sorted(refreshes)[len(refreshes) // 2],
            decode_s,
            "decoding everything once",
        ),
        _row("memory for all of it", "MB", grown / 1e6, size / 1e6, "the files"),
        _row("largest answer", "MB", largest / 1e6, size / 1e6, "the files"),
    ]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def metric_lines(count: int, first: int = 0) -> Iterator[bytes]:
    for number in range(first, first + count // 2):
        at = BEGAN_AT + number * 0.17
        step = {"kind": "step", "at": at, "pipeline": "p", "step": number, "reward": number % 100 / 100, "samples": 64}
        figures = {"staleness_mean": 1.5, "staleness_max": 2, **dict.fromkeys(STEP_METRICS, number % 97 / 97)}
        yield orjson.dumps(step | figures) + b"\n"
        pipeline = {"phase": "running", "step": number, **dict.fromkeys(PIPELINE_GAUGES, number % 89)}
        processes = {f"p/worker-{one}": dict.fromkeys(PROCESS_GAUGES, number % 83 / 830) for one in range(4)}
        yield orjson.dumps({"kind": "gauges", "at": at, "pipelines": {"p": pipeline}, "processes": processes}) + b"\n"


def write_metrics(run: RunDir, count: int) -> None:
    with run.metrics_path.open("wb") as file:
        file.writelines(metric_lines(count))


def write_journal(run: RunDir, count: int) -> None:
    """Around the ring, a group at a time: five events each."""
    journal = Journal(run.journal_path, run.run_id)
    name, encode = PipelineName("p"), msgspec.msgpack.encode
    for number in range(count // 5):
        at = BEGAN_AT + number * 2.0
        samples = list(range(number * GROUP, number * GROUP + GROUP))
        rollouts = [
            {
                "sample": one,
                "version": number,
                "reward": 0.5,
                "length": 64,
                "weights_digest": "0" * 32,
                "payload": [1, 2, 3, 4],
                "times": [0.1, 1.0, 0.1, 0.2],
            }
            for one in samples
        ]
        manifest = {"version": number + 1, "buckets": [{"size_bytes": 1 << 20}]}
        for event, notes in (
            (
                {"type": "ask_lease", "member": "w", "request": number, "samples": GROUP, "version": number},
                {"leases": [(number, 0, samples)]},
            ),
            ({"type": "deliver", "member": "w", "rollouts": rollouts}, {}),
            ({"type": "ask_batch", "member": "t", "step": number}, {"batch": [(number, 0, samples)]}),
            ({"type": "ack_step", "member": "t", "step": number, "metrics": dict.fromkeys(STEP_METRICS, 0.5)}, {}),
            ({"type": "publish_weights", "member": "t", "manifest": manifest}, {}),
        ):
            journal.append(name, at, encode(event), encode(notes) if notes else b"")
    journal.close(120.0)


def _catch_up(reader: RunReader) -> None:
    while not reader.refresh(10.0):
        pass


def _decode_all(run: RunDir) -> None:
    with run.metrics_path.open("rb") as lines:
        for line in lines:
            orjson.loads(line)
    decode = msgspec.msgpack.Decoder(dict).decode
    for entry in history(run.journal_path):
        decode(entry.body)
        if entry.decided:
            decode(entry.decided)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        while chunk := file.read(1 << 20):
            yield chunk


def _row(name: str, unit: str, ours: float, peer: float, peer_name: str) -> dict:
    return {"name": name, "unit": unit, "ours": ours, "peer": peer, "peer_name": peer_name, "ratio": ours / peer}


def _shown(value: float, unit: str) -> str:
    return f"{value * 1e3:,.1f} ms" if unit == "s" and value < 1 else f"{value:,.2f} {unit}"
