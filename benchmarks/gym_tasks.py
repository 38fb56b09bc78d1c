"""Environment steps that whole runs need to learn gymnasium tasks, over seeds, beside cleanrl's published returns.

Each run is what `penstock run` makes of the task's few lines, with the default settings of a gymnasium policy and
samples up to two versions old. *Solved* is the first environment step at which the last 100 trained episodes have a
mean return of at least the threshold; episodes that were played and dropped count as steps too. cleanrl's `ppo.py` is
not run here: its table has final returns after 500,000 steps, mean and spread over three seeds, and has no row for
the other tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.runtime.interpreter import python_command

EPISODES = 100
"""Whose mean return is compared with the threshold."""
PEER = "cleanrl ppo.py (docs/rl-algorithms/ppo.md at 04d2c479): 4 environments, 128 steps, learning rate 2.5e-4"


@dataclass(frozen=True)
class Task:
    id: str
    threshold: float
    steps: int
    """Optimiser steps of a run, of 16 episodes each."""
    peer: str = "not published"
    settings: str = ""
    """Lines of TOML; whatever is not a default."""
    model: str = ""


TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, 60, "488.75 ± 18.40"),
    "acrobot": Task("Acrobot-v1", -100.0, 60, "-82.48 ± 5.93"),
    "pendulum": Task("Pendulum-v1", -200.0, 100),
    "corridor": Task("corridor:Corridor-v0", 0.95, 60),
    "corridor, discount 1": Task("corridor:Corridor-v0", 0.95, 60, settings="[pipeline.ppo_loss]\ndiscount = 1.0"),
    "lunarlander": Task(
        "LunarLander-v3",
        200.0,
        100,
        model="normalize_observations = true",
        settings="[pipeline.ppo_loss]\ndiscount = 0.999\ngae_lambda = 0.98\nentropy_coefficient = 0.01\n"
        "[pipeline.optimizer]\nlearning_rate = 1e-3\nepochs = 4\nminibatches = 32",
    ),
}


@dataclass
class Learned:
    """One run."""

    solved_at: int | None
    """Environment steps; None if the threshold was never reached."""
    environment_steps: int
    last_return: float
    """Mean of the last episodes."""
    wall_s: float
    evaluations: list[float]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gym_tasks", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every run")
    parser.add_argument("--quick", action="store_true", help="the corridor only, two seeds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=[*TASKS])
    options = parser.parse_args(argv)
    tasks, seeds = (["corridor"], 2) if options.quick else (options.tasks, options.seeds)
    console = Console(width=120)
    found: dict[str, list[Learned]] = {}
    for name in tasks:
        if missing := missing_package(TASKS[name]):
            console.print(f"{name}: left out, {missing}")
            continue
        for seed in range(seeds):
            found.setdefault(name, []).append(learn(TASKS[name], seed))
            console.print(f"{name}, seed {seed}: {found[name][-1]}")
            if options.json:
                options.json.write_text(json.dumps(_figures(found), indent=2))
    console.print(_table(found))
    console.print(f"peer: {PEER}; final returns after 500,000 steps")
    return 0


def missing_package(task: Task) -> str:
    """Why the environment cannot be made here; empty if it can."""
    import gymnasium

    sys.path.insert(0, str(_examples()))
    try:
        gymnasium.make(task.id).close()
    except (gymnasium.error.Error, ImportError) as error:
        return str(error)
    return ""


def learn(task: Task, seed: int) -> Learned:
    """One whole run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(_configuration(task, seed, Path(folder) / "runs"))
        began = time.monotonic()
        command = python_command("-m", "penstock.cli.entry", "run", str(path))
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            raise SystemExit(f"the run of {task.id} failed:\n{said.stdout}\n{said.stderr}")
        [lines] = (Path(folder) / "runs").glob("*/metrics.jsonl")
        entries = [json.loads(line) for line in lines.read_text().splitlines()]
    return read(entries, task.threshold, time.monotonic() - began)


def read(entries: Sequence[dict[str, Any]], threshold: float, wall_s: float) -> Learned:
    """From the lines of `metrics.jsonl`."""
    solved_at, total = None, 0
    recent: deque[tuple[float, int]] = deque()
    for line in (entry for entry in entries if entry["kind"] == "step"):
        total += int(line["tokens"] + line["dropped"] * line.get("dropped_length_mean", 0.0))
        recent.append((line["reward"], line["samples"]))
        while sum(samples for _, samples in recent) - recent[0][1] >= EPISODES:
            recent.popleft()
        episodes = sum(samples for _, samples in recent)
        mean = sum(reward * samples for reward, samples in recent) / episodes
        if solved_at is None and episodes >= EPISODES and mean >= threshold:
            solved_at = total
    mean = sum(reward * samples for reward, samples in recent) / sum(samples for _, samples in recent)
    evaluations = [entry["eval/reward"] for entry in entries if "eval/reward" in entry]
    return Learned(solved_at, total, mean, wall_s, evaluations)


def _configuration(task: Task, seed: int, runs: Path) -> str:
    return f"""
[run]
name = "gym"
seed = {seed}
dir = {json.dumps(str(runs))}
extra_path = [{json.dumps(str(_examples()))}]
[[pipeline]]
name = "p"
steps = {task.steps}
[pipeline.env]
name = "gymnasium"
options = {{ id = "{task.id}" }}
[pipeline.model]
kind = "mlp"
{task.model}
[pipeline.rollout]
group_size = 1
batch_samples = 16
[pipeline.train]
groups_per_step = 16
[pipeline.evaluation]
every_steps = {task.steps}
prompts = 32
{task.settings}
"""


def _examples() -> Path:
    return Path(__file__).resolve().parents[1] / "examples"


def _figures(found: dict[str, list[Learned]]) -> dict[str, Any]:
    return {"peer": PEER, "tasks": {name: [asdict(run) for run in runs] for name, runs in found.items()}}


def _table(found: dict[str, list[Learned]]) -> Table:
    table = Table(title="environment steps to the threshold: median (least to most) of the seeds that reached it")
    for column in ("task", "threshold", "solved", "steps", "last 100 episodes", "cleanrl, final", "settings"):
        table.add_column(column, justify="left" if column in ("task", "settings") else "right")
    for name, runs in found.items():
        task = TASKS[name]
        reached = [run.solved_at for run in runs if run.solved_at is not None]
        steps = f"{statistics.median(reached):,.0f} ({min(reached):,} to {max(reached):,})" if reached else "-"
        returns = [run.last_return for run in runs]
        last = f"{statistics.mean(returns):.2f} ± {statistics.pstdev(returns):.2f}"
        settings = " ".join((task.model + "\n" + task.settings).split("\n")).strip() or "defaults"
        table.add_row(name, f"{task.threshold:g}", f"{len(reached)}/{len(runs)}", steps, last, task.peer, settings)
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
