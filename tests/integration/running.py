"""Starting `penstock run` as a user would, and looking at what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from penstock.engines.vllm.leftovers import homes_in, remove_leftovers
from penstock.journal.reader import history
from penstock.payload.io.leftovers import sweep
from penstock.runtime.rundir import RunDir

TINY = """\
[pipeline.model]
kind = "tiny"
hidden = 32
layers = 1
heads = 2
[pipeline.train]
groups_per_step = 4
[pipeline.rollout]
group_size = 4
batch_samples = 16
max_new_tokens = 4
"""
"""The smallest that learns; more keys of `[pipeline.rollout]` may follow."""

LETTERS = (
    """\
[run]
name = "test"
dir = "{dir}"
{run}

[[pipeline]]
name = "letters"
steps = {steps}
{pipeline}
[pipeline.env]
name = "copy"
"""
    + TINY
    + """{rollout}
[pipeline.checkpoint]
every_steps = {checkpoint_every}
"""
)


def letters(
    folder: Path,
    *,
    steps: int = 10,
    run: str = "",
    pipeline: str = "",
    rollout: str = "",
    checkpoint_every: int = 5,
    extra: str = "",
) -> Path:
    """Writes a small language-model configuration and returns its path."""
    path = folder / "run.toml"
    text = LETTERS.format(
        dir=folder / "runs", steps=steps, run=run, pipeline=pipeline, rollout=rollout, checkpoint_every=checkpoint_every
    )
    path.write_text(text + extra)
    return path


@dataclass
class Running:
    """A `penstock run` in flight."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def directory(self) -> Path:
        return wait_for(lambda: next(iter(sorted((self.folder / "runs").glob("*/run.json"))), None), 30).parent

    def children(self) -> dict[str, psutil.Process]:
        """The run's processes by name; sidecars and other grandchildren are not among them."""
        named: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                arguments = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "--name" in arguments:
                named[arguments[arguments.index("--name") + 1]] = child
        return named

    def child(self, name: str, timeout_s: float = 30) -> psutil.Process:
        return wait_for(lambda: self.children().get(name), timeout_s, f"a process named {name}")

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        wait_for(lambda: self.process.poll() is not None or trained_steps(self.directory) > step, timeout_s)
        if self.process.poll() is not None and trained_steps(self.directory) <= step:
            raise AssertionError(f"the run ended before step {step}:\n{self.output()}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 120) -> tuple[int, str]:
        """Waits for the end; exit code and everything it printed."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.logs()}") from None
        return self.process.returncode, output

    def output(self) -> str:
        return self.end(5)[1]

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.directory / "logs").glob("*.log"))
        )


_started: list[subprocess.Popen[str]] = []


def start(folder: Path, *arguments: str | Path, command: str = "run") -> Running:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.entry", command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
    )
    _started.append(process)
    return Running(process, folder)


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
    """Waits for a condition, never for a fixed time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.05)
    return found


def step_lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    entries = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry.get("kind") == "step":
            entries.append(entry)
    return entries


def trained_steps(directory: Path) -> int:
    return max((entry["step"] + 1 for entry in step_lines(directory)), default=0)


def trained_prompts(directory: Path, pipeline: str | None = None) -> Counter[int]:
    """How often each prompt is in the training that led to the final weights: the last batch given for each step.

    Of one pipeline, or of the only one.
    """
    batches: dict[int, list[int]] = {}
    missing: dict[int, set[int]] = {}
    for entry in history(directory / "journal.sqlite"):
        if pipeline is not None and entry.pipeline != pipeline:
            continue
        event = msgspec.msgpack.decode(entry.body)
        decided = msgspec.msgpack.decode(entry.decided) if entry.decided else {}
        if event["type"] == "ask_batch" and "batch" in decided:
            batches[event["step"]] = [prompt for prompt, _, _ in decided["batch"]]
        elif event["type"] == "ack_step":
            missing[event["step"]] = set(event.get("missing_prompts", ()))
    return Counter(
        prompt
        for step, prompts in batches.items()
        if step in missing
        for prompt in prompts
        if prompt not in missing[step]
    )


def left_behind(folder: Path) -> list[str]:
    """Processes of runs in `folder` that are still alive."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if any(str(folder) in argument for argument in arguments) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.pid}: {' '.join(arguments)}")
    return found


def no_leftovers(folder: Path) -> Iterator[None]:
    """Body of a fixture: after the test no process and no shared memory of its runs may be left."""
    yield
    try:
        wait_for(lambda: not left_behind(folder), 10, f"all processes of {folder} to end")
        for marker in folder.glob("runs/*/run.json"):
            assert sweep(RunDir.open(marker.parent).run_id) == [], "shared memory was left behind"
            assert remove_leftovers(homes_in(marker.parent)) == [], "a vLLM server left something behind"
    finally:
        while _started:  # one test that failed must not disturb the next
            with _started.pop() as process:
                process.kill()


def outside_address() -> str:
    """An address of this machine by which others would reach it."""
    addresses = [
        one.address for group in psutil.net_if_addrs().values() for one in group if one.family == socket.AF_INET
    ]
    outside = next((address for address in addresses if not address.startswith("127.")), None)
    if outside is None:
        pytest.skip("this machine has no other address than loopback")
    return outside
