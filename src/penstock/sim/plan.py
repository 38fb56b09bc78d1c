"""A simulated run as a value: its settings, its faults and its result."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from penstock.config.run import Config
from penstock.sim.parts import Work
from penstock.sim.storms import Fault, crash_loops, disk_trouble, hangs, storm

NAMES_DAMAGE = {
    "resume with an older checkpoint": "events ",
    "start it from the newest checkpoint": "checkpoints/",
    "is damaged": "",
}
"""Parts of the messages of runs that a lying disk ended, and how an entry of `Report.lost` must begin for each."""
EVALUATION = {"every_steps": 5, "prompts": 6, "samples": 2, "temperature": 1.0, "timeout_s": 60.0}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated run, completely determined by these fields."""

    seed: int = 0
    steps: int = 20
    workers: int = 2
    pipelines: int = 1
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 2
    work: Work = Work()
    faults: tuple[Fault, ...] = ()
    settings: dict[str, Any] = {}
    """Keys of the configuration by dotted name: `control.stall_after_s`, `pipeline.rollout.ring_slots`."""
    config: Config | None = None
    """Used instead of a configuration built from the fields above."""
    resumed: bool = False
    """Resume the run after a failure whose message suggests it, for example a full disk that has space again."""
    limit_s: float = 3600.0
    """Virtual seconds after which the run counts as stuck."""
    real_limit_s: float = 300.0


class Report(msgspec.Struct, kw_only=True):
    """Result of a simulated run."""

    plan: Plan
    ended: str
    """`complete`, or the message with which it failed."""
    virtual_s: float
    real_s: float
    steps: dict[str, list[float]]
    """Completion time of each step, by pipeline."""
    samples: int
    trained_s: float
    """Seconds of optimiser steps, sum over trainers."""
    generated_s: float
    """Seconds of generation, sum over workers."""
    calls: int
    staleness: dict[int, int]
    refused: dict[str, int]
    restarts: int
    digest: str
    """Digest of the whole history."""
    log_lines: list[Any]
    lines: list[str]
    broken: list[str]
    points: list[dict[str, Any]]
    """The recorded evaluations."""
    troubles: dict[str, int]
    """Faults of payload transfers, by kind."""
    turns: int
    """Number of times a process moved to a shared device."""
    fired: dict[str, int]
    status: dict[str, Any]

    lost: list[str] = []
    """Data that a lying disk reported as flushed and lost in a power failure."""

    @property
    def complete(self) -> bool:
        return self.ended == "complete"

    @property
    def acceptable(self) -> bool:
        """Complete, or failed with a message that names an actual damage."""
        return self.complete or any(
            words in self.ended and one.startswith(begins)
            for words, begins in NAMES_DAMAGE.items()
            for one in self.lost
        )

    def first_logged(self, words: str, after_s: float = 0.0) -> float | None:
        """Time of the first log line that contains `words`."""
        return next((one.at for one in self.log_lines if words in one.line and one.at >= after_s), None)


def config_of(plan: Plan) -> Config:
    """A configuration as a user would write it, for a simulated model."""
    if plan.config is not None:
        return plan.config
    tables = [
        {
            "name": f"p{number}",
            "steps": plan.steps,
            "env": {"name": "copy"},
            "model": {"kind": "tiny"},
            "rollout": {
                "workers": plan.workers,
                "group_size": plan.group_size,
                "batch_samples": 2 * plan.group_size,
                "ring_mb": 1,
                "ring_slots": 256,
                "device": "cpu",
            },
            "train": {
                "groups_per_step": plan.groups_per_step,
                "max_staleness": plan.max_staleness,
                "device": "cpu",
            },
            "weights": {"transport": "files"},
            "checkpoint": {"every_steps": 5},
            "samples": {"save_every_steps": 0},
        }
        for number in range(plan.pipelines)
    ]
    whole: dict[str, Any] = {"payload": {"transport": "shm"}, "pipeline": tables, "run": {"max_restarts": 1000}}
    for name, value in plan.settings.items():
        first, *rest = name.split(".")
        for table in tables if first == "pipeline" else [whole.setdefault(first, {})]:
            for part in rest[:-1]:
                table = table.setdefault(part, {})
            table[rest[-1]] = value
    return Config.model_validate(whole)


def workers_of(plan: Plan) -> list[str]:
    return [f"p{number}.rollout.{index}" for number in range(plan.pipelines) for index in range(plan.workers)]


def trainers_of(plan: Plan) -> list[str]:
    return [f"p{number}.trainer" for number in range(plan.pipelines)]


def mixed(seed: int, *, disks: bool = True) -> Plan:
    """A random run in a random storm that ends: the run must complete afterwards.

    Without `disks` it has only the storm: no disk faults, no process that hangs or dies repeatedly.
    """
    random = Random(f"{seed} mixed")
    pipelines, settings = random.choice((1, 1, 1, 1, 2, 3)), {}
    if pipelines > 1 and random.random() < 0.7:
        settings["pool.devices"] = random.choice((2, 3))
    if random.random() < 0.4:
        settings["payload.transport"] = "tcp"
    if random.random() < 0.4:
        settings |= {f"pipeline.evaluation.{name}": value for name, value in EVALUATION.items()}
    if random.random() < 0.3:
        settings["pipeline.weights.way"] = "in_place"
    if random.random() < 0.3:
        settings["pipeline.train.filters"] = ["zero_signal"]
    by_prompts = random.random() < 0.3
    settings["pipeline.epochs"] = 1 if by_prompts else None
    settings["pipeline.train.straggler_wait_s"] = random.choice((0.0, 5.0, 60.0))
    settings["pipeline.checkpoint.every_steps"] = random.choice((1, 3, 5, 10))
    # A separate generator: what else is drawn stays as it is.
    settings["journal.snapshot_every_events"] = Random(f"{seed} snapshots").choice((30, 200, 20_000))
    plan = Plan(
        seed=seed,
        steps=random.choice((20, 30)),
        workers=random.choice((1, 2, 2, 3)),
        pipelines=pipelines,
        groups_per_step=random.choice((1, 4, 4, 6)),
        group_size=random.choice((2, 2, 4)),
        max_staleness=random.choice((0, 1, 2, 2, 4)),
        work=Work(
            spread=random.choice((0.3, 0.9)),
            equal_bytes=random.choice((0.0, 0.0, 0.5, 1.0)),
            equal_rewards=random.choice((0.0, 0.2, 0.6)),
            poison=random.choice((0.0, 0.0, 0.02)),
            prompts=random.choice((90, 101)) if by_prompts else None,
        ),
        settings=settings,
    )
    span_s, every_s = random.choice((40.0, 90.0)), random.choice((4.0, 8.0, 15.0)) / pipelines
    faults = storm(seed, workers_of(plan), trainers_of(plan), span_s=span_s, every_s=every_s)
    if disks and random.random() < 0.5:
        faults += disk_trouble(seed, trainers_of(plan), span_s=span_s)
    if disks and random.random() < 0.2:
        faults += crash_loops(seed, [*workers_of(plan), *trainers_of(plan), "controller"], span_s=span_s)
    if disks and random.random() < 0.2:
        settings["control.wedged_after_s"] = 60.0
        faults += hangs(seed, workers_of(plan), span_s=span_s)
    faults.sort(key=lambda one: one.at_s)
    return msgspec.structs.replace(plan, faults=tuple(faults), resumed=disks)


def as_test(plan: Plan, name: str) -> str:
    """The plan as a test to paste."""
    return f"""def test_{name}() -> None:
    report = simulate({written(plan)})
    assert report.acceptable, report.ended
"""


def written(value: msgspec.Struct) -> str:
    """The struct as Python code, without default values."""
    plain = type(value).__struct_defaults__
    names = value.__struct_fields__
    defaults = dict(zip(names[len(names) - len(plain) :], plain, strict=True))
    parts: list[str] = []
    for name in names:
        one = getattr(value, name)
        if name in defaults and one == defaults[name]:
            continue
        if isinstance(one, tuple):
            text = "(" + "".join(f"{written(item)}, " for item in one) + ")"
        else:
            text = written(one) if isinstance(one, msgspec.Struct) else repr(one)
        parts.append(f"{name}={text}")
    return f"{type(value).__name__}({', '.join(parts)})"
