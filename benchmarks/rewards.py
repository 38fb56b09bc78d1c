"""Samples per second with rewards that wait, beside no reward at all, and beside TRL with the same rewards.

Whole runs of a tiny model on the CPU, with four rewards: one that costs nothing; one that sleeps half a second in each
call; one with a heavy tail (a call in ten sleeps ten times as long); and an `async def` judge that asks a local HTTP
server about each completion, half a second each, over at most 64 connections. Penstock calls a reward once for each
group, TRL once for each batch. TRL needs an interpreter of its own: `--trl-python venv/bin/python`.

The target is 0.9 of the rate without a reward, where concurrency allows it: the judge answers 128 questions a second.
A slow call of the heavy tail lasts several steps, so the staleness bound is wide. Filling and draining are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import itertools
import json
import os
import socketserver
import statistics
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from penstock.runtime.interpreter import python_command

SLEEP_S = 0.5
CONNECTIONS = 64
JUDGE = "PENSTOCK_BENCH_JUDGE"
REWARDS = ("nothing", "sleeps", "heavy_tail", "judge")


def parities(completions: Sequence[str]) -> list[float]:
    """Differ within every group."""
    return [float(len(completion) % 2) for completion in completions]


def nothing(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    return parities(completions)


nothing.inline = True  # type: ignore[attr-defined]


def sleeps(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    time.sleep(SLEEP_S)
    return parities(completions)


def heavy_tail(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    long = zlib.crc32("".join(completions).encode()) % 10 == 0
    time.sleep(SLEEP_S * (5.0 if long else 0.5))
    return parities(completions)


_connections: asyncio.Semaphore | None = None


async def judge(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    global _connections
    _connections = _connections or asyncio.Semaphore(CONNECTIONS)

    async def ask(completion: str) -> float:
        assert _connections is not None
        async with _connections:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ[JUDGE]))
            writer.write(b"GET /%d HTTP/1.0\r\n\r\n" % len(completion))
            said = await reader.read()
            writer.close()
            return float(said.rpartition(b"\r\n")[2])

    return list(await asyncio.gather(*map(ask, completions)))


class _Judge(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(SLEEP_S)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(int(self.path[1:]) % 2).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


class _JudgeServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    request_queue_size = CONNECTIONS
    daemon_threads = True


CONFIGURATION = """
[run]
name = "rewards"
dir = {dir}
extra_path = [{here}]
[[pipeline]]
name = "p"
steps = {steps}
[pipeline.env]
name = "copy"
options = {{ length = 7 }}
rewards = ["rewards:{reward}"]
[pipeline.model]
kind = "path"
path = {model}
[pipeline.rollout]
group_size = 8
max_new_tokens = {tokens}
[pipeline.train]
groups_per_step = {groups}
max_staleness = {staleness}
[pipeline.checkpoint]
every_steps = 1000
"""


def ours(reward: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Samples a second after the first third of the steps, and the most memory that the run's processes had."""
    folder.mkdir()
    values = {name: json.dumps(str(path)) for name, path in (("dir", folder / "runs"), ("model", options.model))}
    values["here"] = json.dumps(str(Path(__file__).parent))
    keys = {"steps": options.steps, "tokens": options.tokens, "groups": options.groups, "staleness": options.staleness}
    (folder / "run.toml").write_text(CONFIGURATION.format(reward=reward, **values, **keys))
    command = python_command("-m", "penstock.cli.entry", "run", str(folder / "run.toml"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        peak = [0]
        watching = threading.Thread(target=watch_memory, args=(process.pid, peak), daemon=True)
        watching.start()
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(said)
    [lines] = (folder / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    at = [line["at"] for line in steps if line["kind"] == "step"]
    # The last steps wait for samples that are under way, with nothing new begun beside them.
    return {"rate": rate(at[: -options.staleness], options), "peak_mb": peak[0] / 2**20}


def rate(at: Sequence[float], options: argparse.Namespace) -> float:
    first = len(at) // 3
    return options.groups * 8 * (len(at) - 1 - first) / (at[-1] - at[first])


def watch_memory(pid: int, peak: list[int]) -> None:
    try:
        process = psutil.Process(pid)
        while process.is_running():
            total = 0
            for one in process.children(recursive=True):
                try:
                    total += one.memory_info().rss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(0.2)
    except psutil.NoSuchProcess:
        return


def theirs(reward: str, options: argparse.Namespace) -> float | None:
    """The same by TRL; None where there is none."""
    if options.trl_python is None:
        return None
    script = Path(__file__).with_name("_rewards_trl.py")
    asked = {"reward": reward, "model": str(options.model), "steps": options.trl_steps}
    asked |= {"groups": options.groups, "tokens": options.tokens}
    ended = subprocess.run([options.trl_python, script, json.dumps(asked)], capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"TRL failed with {reward}: {ended.stderr[-600:]}")
        return None
    return rate(json.loads(ended.stdout.splitlines()[-1]), options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16, help="of a step, with 8 samples each")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--trl-python", metavar="PYTHON", help="an interpreter with TRL, to measure it in the same run")
    parser.add_argument("--trl-steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="of every reward in turn; medians are shown")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    from end_to_end import SHAPES, save_model

    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, _JudgeServer(("127.0.0.1", 0), _Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ[JUDGE] = str(server.server_address[1])
        options.model = Path(name) / "model"
        save_model(SHAPES["tiny"], options.model)
        rewards = ["nothing", *(reward for reward in options.rewards if reward != "nothing")]
        found: dict[str, list[dict[str, float]]] = {reward: [] for reward in rewards}
        peers: dict[str, list[float]] = {reward: [] for reward in rewards}
        for number, reward in itertools.product(range(options.rounds), rewards):
            found[reward].append(ours(reward, options, Path(name) / f"{reward}-{number}"))
            peers[reward] += [] if (peer := theirs(reward, options)) is None else [peer]
            print(f"round {number}, {reward}: {found[reward][-1]['rate']:.1f} samples/s", flush=True)
        for reward in rewards:
            rates = [one["rate"] for one in found[reward]]
            free = statistics.median(one["rate"] for one in found["nothing"])
            allowed = CONNECTIONS / SLEEP_S if reward == "judge" else float("inf")
            peer = statistics.median(peers[reward]) if peers[reward] else None
            figures.append(
                {
                    "name": f"samples/s, reward {reward}",
                    "unit": "samples/s",
                    "ours": statistics.median(rates),
                    "ours_range": [min(rates), max(rates)],
                    "peer": peer,
                    "ratio": peer and statistics.median(rates) / peer,
                    "of_no_reward": statistics.median(rates) / min(free, allowed),
                    "peak_mb": max(one["peak_mb"] for one in found[reward]),
                }
            )
            line = figures[-1]
            beside = "TRL not measured (--trl-python)" if peer is None else f"TRL {peer:.1f}"
            print(
                f"{reward:12} penstock {line['ours']:8.1f} samples/s ({min(rates):.0f} to {max(rates):.0f}), "
                f"{line['of_no_reward']:.2f} of what is possible, {line['peak_mb']:.0f} MB at most; {beside}",
                flush=True,
            )
        server.shutdown()
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
