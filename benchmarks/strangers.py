"""Steps per second of a small run while callers without the token attack its ports, beside the same run left alone.

One run with agents, payloads over TCP and pulled weights, and a dashboard of it. Each attack goes to one port at a
time, always on 127.0.0.1. Windows with and without it alternate, so that other load on the machine falls on both; a
ratio is the median of the steps per second with the attack over the median without. The dashboard is no part of a run:
its figures are pages per second of a reader with the token. The attacker is one process at nice 19 with three threads
and a pause after each piece that it sends: on a machine with two cores it would otherwise take a share of the processor
by itself. Beside the rate: memory that the attacked process has gained, and what the attacker sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from penstock.journal.reader import history
from penstock.runtime.rundir import RunDir

THREADS = 3
PAUSE_S = 0.002
IDLE = 300
CONFIG = """
[run]
name = "attacked"
dir = "{folder}/runs"
extra_path = ["{folder}"]
[[pipeline]]
name = "agent"
steps = 1000000
[pipeline.env]
name = "agent"
options = {{ function = "attacked_agent:play", alphabet = "abc>?" }}
[pipeline.model]
kind = "tiny"
hidden = 32
layers = 1
heads = 2
[pipeline.train]
groups_per_step = 2
[pipeline.rollout]
group_size = 4
max_new_tokens = 2
[pipeline.weights]
transport = "pull"
[payload]
transport = "tcp"
"""
AGENT = """
import json, urllib.request


def play(base_url, api_key):
    body = json.dumps({"model": "policy", "prompt": "ab>"}).encode()
    request = urllib.request.Request(base_url + "/completions", body, {"Authorization": "Bearer " + api_key})
    return float("a" in json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])
"""
CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "endless trailers": (CHUNKED + b"0\r\n", b"T: v\r\n" * 10_000),
    "chunk extensions": (CHUNKED + b"3;", b"e=v;" * 16_000),
    "unread replies": (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
    "endless head": (b"GET /healthz HTTP/1.1\r\nX: ", b"a" * 65536),
    "slow heads": (b"GET /healthz HTTP/1.1\r\nX: ", b"a"),
    "new connections": (b"", b""),
    "idle connections": (b"", b""),
}
"""What is sent first on a connection, and then again and again, without reading."""


def main(argv: list[str]) -> int:
    if argv[:1] == ["--attacker"]:
        return attack(argv[1], int(argv[2]), float(argv[3]))
    parser = argparse.ArgumentParser(prog="penstock bench strangers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of short windows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--port", action="append", help="attack only this port; may be repeated")
    parser.add_argument("--attack", action="append", choices=[*ATTACKS], help="only this attack; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    rounds, window_s = (1, 1.5) if options.quick else (options.rounds, options.seconds)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, attacked_run(Path(name)) as (directory, ports, pages):
        for port, (number, pid) in ports.items():
            if options.port and port not in options.port:
                continue
            count = pages if port == "dashboard" else lambda: steps_of(directory)
            for kind in options.attack or ATTACKS:
                rows.append(measure(port, number, pid, kind, count, rounds, window_s))
                print(rows[-1], file=sys.stderr)
    table = Table(title=f"{rounds} windows of {window_s:g} s with and without each attack", title_justify="left")
    for column in ("port", "attack", "alone", "attacked", "ratio", "memory gained", "sent"):
        table.add_column(column, justify="left" if column in ("port", "attack") else "right")
    for row in rows:
        table.add_row(
            row["port"],
            row["attack"],
            f"{row['alone']:.1f}/s",
            f"{row['attacked']:.1f}/s",
            f"{row['ratio']:.2f}",
            f"{row['gained_mb']:.0f} MB",
            f"{row['connections']} connections, {row['sent_mb']:.0f} MB",
        )
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


def measure(
    port: str, number: int, pid: int, kind: str, count: Callable[[], int], rounds: int, window_s: float
) -> dict[str, Any]:
    alone, attacked, connections, sent = list[float](), list[float](), 0, 0
    memory = psutil.Process(pid).memory_info
    before = memory().rss
    most = before
    for _ in range(rounds):
        alone.append(rate(count, window_s))
        command = [sys.executable, __file__, "--attacker", kind, str(number), str(window_s + 1.0)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            attacked.append(rate(count, window_s))
            most = max(most, memory().rss)
            done = json.loads(attacker.stdout.readline())
        connections, sent = connections + done["connections"], sent + done["sent"]
    return {
        "port": port,
        "attack": kind,
        "alone": statistics.median(alone),
        "attacked": statistics.median(attacked),
        "ratio": statistics.median(attacked) / max(1e-9, statistics.median(alone)),
        "gained_mb": (most - before) / 1e6,
        "connections": connections,
        "sent_mb": sent / 1e6,
    }


def rate(count: Callable[[], int], window_s: float) -> float:
    before, began = count(), time.monotonic()
    time.sleep(window_s)
    return (count() - before) / (time.monotonic() - began)


# -- the attacker, in a process of its own --------------------------------------------------------------------------


def attack(kind: str, port: int, seconds: float) -> int:
    os.nice(19)
    until = time.monotonic() + seconds
    begin, more = ATTACKS[kind]
    counts = {"connections": 0, "sent": 0}
    kept: list[socket.socket] = []

    def connect() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), 1.0)
        counts["connections"] += 1
        return connection

    def send() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError), connect() as connection:
                connection.settimeout(0.2)
                connection.sendall(begin)
                while more and time.monotonic() < until:
                    connection.sendall(more)
                    counts["sent"] += len(more)
                    time.sleep(PAUSE_S if len(more) > 1 else 0.01)
            time.sleep(PAUSE_S)

    def hold() -> None:
        """As many as are open at once; one that was closed is opened again."""
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                kept.append(connect())
            if len(kept) > IDLE // THREADS:
                kept.pop(0).close()
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=hold if kind == "idle connections" else send) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("began", flush=True)
    for thread in threads:
        thread.join()
    for connection in kept:
        connection.close()
    print(json.dumps(counts), flush=True)
    return 0


# -- the run --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attacked_run(folder: Path) -> Iterator[tuple[Path, dict[str, tuple[int, int]], Callable[[], int]]]:
    """A run that trains, its ports (number and process) by name, and the pages that a reader of the dashboard got."""
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    (folder / "attacked_agent.py").write_text(AGENT)
    command = [sys.executable, "-m", "penstock.cli.entry"]
    log = (folder / "output").open("w")
    run = subprocess.Popen([*command, "run", str(folder / "config.toml")], stdout=log, stderr=log, cwd=folder)
    shown: subprocess.Popen[str] | None = None
    over = threading.Event()
    reader: threading.Thread | None = None
    pages = [0]
    try:
        directory = wait_for(lambda: next(iter((folder / "runs").glob("*/run.json")), None), folder).parent
        wait_for(lambda: steps_of(directory) >= 5, folder)
        shown = subprocess.Popen(
            [*command, "dashboard", str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert shown.stdout is not None
        found = re.search(r"dashboard: (http://\S+:(\d+)/\S+/)", shown.stdout.readline())
        assert found is not None
        reader = threading.Thread(target=read_pages, args=(found.group(1), pages, over))
        reader.start()
        wait_for(lambda: pages[0] > 0, folder)
        ports = ports_of(directory, run.pid) | {"dashboard": (int(found.group(2)), shown.pid)}
        yield directory, ports, lambda: pages[0]
    finally:
        over.set()
        if reader is not None:
            reader.join(30)
        for process in (shown, run):
            if process is not None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        log.close()


def read_pages(address: str, pages: list[int], over: threading.Event) -> None:
    """One page after the other with a short pause, on one connection."""
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        while not over.wait(0.005):
            with contextlib.suppress(httpx.HTTPError):
                pages[0] += client.get(address).status_code == 200


def ports_of(directory: Path, top: int) -> dict[str, tuple[int, int]]:
    endpoint = RunDir.open(directory).read_endpoint()
    assert endpoint is not None
    numbers = {endpoint.port: "controller"}
    for entry in history(directory / "journal.sqlite"):
        event = msgspec.msgpack.decode(entry.body)
        if event["type"] == "register" and event.get("ring"):
            numbers |= dict.fromkeys(event["ring"].get("tcp_ports", ()), "payloads")
    for path in directory.glob("weights/**/manifest.json"):
        for address in json.loads(path.read_text())["addresses"]:
            numbers[int(address.rpartition(":")[2])] = "weights"
    found: dict[str, tuple[int, int]] = {}
    for process in psutil.Process(top).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for line in process.net_connections(kind="tcp"):
                if line.status == psutil.CONN_LISTEN:
                    found[numbers.get(line.laddr.port, "agents")] = (line.laddr.port, process.pid)
    return found


def steps_of(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (directory / "metrics.jsonl").read_bytes().count(b'"kind":"step"')
    return 0


def wait_for(condition: Callable[[], Any], folder: Path) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run did not get going:\n{(folder / 'output').read_text()[-3000:]}")
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
