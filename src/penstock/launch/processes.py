"""The processes of a run, and how every launcher starts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.run import Config
from penstock.runtime.interpreter import python_command, search_path
from penstock.runtime.parent import MEMBER_VARIABLE


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the run. `wave` orders the shutdown: lower waves are stopped first.

    The run continues without a process that is not `vital`.
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    threads: int
    pipeline: str | None = None
    wave: int = 0
    vital: bool = True
    index: int = 0
    """Of a worker, within its pipeline."""


CONTROLLER = ProcessSpec("controller", "controller", (), 1, wave=1)


def processes_of(config: Config) -> list[ProcessSpec]:
    """All processes of the run, the controller first."""
    specs = [CONTROLLER]
    for pipeline in config.pipeline:
        specs.append(
            ProcessSpec(
                f"{pipeline.name}.trainer",
                "trainer",
                ("--pipeline", pipeline.name),
                pipeline.train.threads,
                pipeline.name,
            )
        )
        for index in range(pipeline.rollout.workers):
            specs.append(
                ProcessSpec(
                    f"{pipeline.name}.rollout.{index}",
                    "rollout_worker",
                    ("--pipeline", pipeline.name, "--index", str(index)),
                    pipeline.rollout.threads,
                    pipeline.name,
                    index=index,
                )
            )
    for index, sink in enumerate(config.metrics.sinks):
        arguments = ("--index", str(index))
        specs.append(ProcessSpec(f"sink.{sink}", "metrics_sink", arguments, threads=1, wave=2, vital=False))
    return specs


def command(spec: ProcessSpec, run_root: Path, member: str, session: str, parent: int, host: str = "") -> list[str]:
    """The command line. The process ends with the process `parent`. `host` is its address for other machines."""
    return [
        *python_command("-m", "penstock.roles", spec.role, str(run_root)),
        *("--name", spec.name, "--member", member, "--session", session, "--parent", str(parent)),
        *(("--host", host) if host else ()),
        *spec.arguments,
    ]


def environment(spec: ProcessSpec, extra_path: Iterable[Path | str], member: str = "") -> dict[str, str]:
    """The parent's environment with the variables of this process. Its descendants inherit `member`, by which they are
    found when the process has ended."""
    threads = str(spec.threads)
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **({MEMBER_VARIABLE: member} if member else {}),
        "PYTHONPATH": search_path(*extra_path),
    }
