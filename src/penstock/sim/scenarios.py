"""Reproductions of public failures of other projects: what happens here, and after how many seconds it is reported.

Write your own as a Python file with `SCENARIOS = [Scenario(...)]`, or as a TOML file of tables `[[scenario]]` with the
same fields, and run it with `penstock simulate --scenario FILE`.
"""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.sim.parts import Work
from penstock.sim.plan import Plan, Report, trainers_of, workers_of
from penstock.sim.storms import KINDS, Fault

W0, W1, TRAINER, CONTROLLER = "p0.rollout.0", "p0.rollout.1", "p0.trainer", "controller"


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run, its faults and its expected result."""

    name: str
    elsewhere: str = ""
    """Where it occurred, and its effect there."""
    here: str
    """What Penstock does."""
    plan: Plan
    struck_s: float = 0.0
    """Start of the fault: the report is timed from there."""
    says: str = ""
    """Part of a log line that names the fault."""
    within_s: float = 0.0
    """Seconds after the fault within which the line must be written."""
    ends: str = "complete"
    """`complete`, or part of the message with which the run fails."""
    check: Callable[[Report], bool] = lambda report: True


class Result(msgspec.Struct, frozen=True):
    """Result of a scenario."""

    scenario: Scenario
    report: Report
    said_after_s: float | None
    line: str
    problem: str
    """Empty if the result is as expected."""


def judged(scenario: Scenario, report: Report) -> Result:
    found = next(
        (
            one
            for one in report.log_lines
            if one.at >= scenario.struck_s and scenario.says and scenario.says in one.line
        ),
        None,
    )
    after_s = found.at - scenario.struck_s if found is not None else None
    problem = ""
    if scenario.ends not in report.ended:
        problem = f"it ended with {report.ended!r}, expected {scenario.ends!r}"
    elif scenario.says and after_s is None:
        problem = f"no log line contains {scenario.says!r}"
    elif after_s is not None and after_s > scenario.within_s:
        problem = f"it was reported after {after_s:.1f} s, expected within {scenario.within_s:g} s"
    elif not scenario.check(report):
        problem = "the report of the run does not pass the check of the scenario"
    return Result(scenario, report, after_s, found.line if found is not None else "", problem)


def _pipeline(report: Report) -> dict[str, float]:
    return report.status["pipelines"]["p0"]


def _resumes_exactly(report: Report) -> bool:
    """Every step once, and each with its full batch."""
    return len(report.steps["p0"]) == report.plan.steps and _pipeline(report)["conservation_error"] == 0


IMPATIENT = {"control.wedged_after_s": 120.0, "pipeline.train.straggler_wait_s": 0.0}

SCENARIOS = [
    Scenario(
        name="buffer-one-short",
        elsewhere="SkyRL #1173: the buffer stayed at 127 of 128 for 29 h, in three runs",
        here="the worker that holds the missing samples is named, then replaced; its leases are issued again",
        plan=Plan(steps=20, faults=(Fault(10.0, "hang", W0, for_s=3000.0),), settings=IMPATIENT),
        struck_s=10.0,
        says="should deliver them",
        within_s=90.0,
        check=lambda report: report.restarts == 5,
    ),
    Scenario(
        name="client-without-timeout",
        elsewhere="prime-rl #2230: the orchestrator was wedged for 43 h on a client without a timeout",
        here="every call has a deadline: a trainer that cannot reach the controller exits and is replaced",
        plan=Plan(steps=20, faults=(Fault(10.0, "cut", TRAINER, for_s=90.0),)),
        struck_s=10.0,
        says="no message for",
        within_s=20.0,
    ),
    Scenario(
        name="dead-watcher",
        elsewhere="prime-rl #2986: a dead watcher task is never checked",
        here="a failed task ends its process; an unexpected error ends the run, with a message that names the task",
        plan=Plan(steps=20, faults=(Fault(10.0, "crash", W0),)),
        struck_s=10.0,
        says="task 'update weights' failed: MemoryError",
        within_s=5.0,
        ends="task 'update weights' failed: MemoryError",
    ),
    Scenario(
        name="half-applied-engine",
        elsewhere="prime-rl #3599: a retry posts again into a half-applied engine and the run dies",
        here="a replica that received any byte in place is torn: it serves nothing until a whole version is verified",
        plan=Plan(
            steps=20,
            faults=(Fault(10.0, "tear", W0, for_s=8.0),),
            settings={"pipeline.weights.way": "in_place"},
        ),
        struck_s=10.0,
        says="update failed at step 'write'",
        within_s=5.0,
    ),
    Scenario(
        name="slow-sync",
        elsewhere="prime-rl #3599: a sync takes 72 min",
        here="generation continues with the old version, within the staleness bound, while the new one is fetched",
        plan=Plan(steps=12, work=Work(fetch_weights_s=40.0)),
        says="'loading weights' did not end",
        within_s=75.0,
        check=lambda report: max(report.staleness) <= 2,
    ),
    Scenario(
        name="silent-hang",
        elsewhere="verl #7155, #7990; NeMo-RL #3488, #3238, #2899: silent hangs",
        here="the trainer that holds a batch and makes no progress is named, then replaced",
        plan=Plan(steps=20, faults=(Fault(10.0, "hang_trainer", for_s=4.0),), settings=IMPATIENT),
        struck_s=10.0,
        says="has held the batch of step",
        within_s=75.0,
    ),
    Scenario(
        name="stale-drop-pins-resume",
        elsewhere="TRL #7274: one stale drop pins the resume position",
        here="an outdated group is dropped and its prompt issued again; a resume starts from the sample table",
        plan=Plan(
            seed=4,
            steps=20,
            faults=(
                Fault(6.0, "stop", W0, for_s=10.0),
                Fault(8.0, "kill", TRAINER),
                Fault(20.0, "kill", TRAINER),
                Fault(25.0, "power_off", for_s=5.0),
            ),
        ),
        struck_s=25.0,
        says="resumed at step",
        within_s=10.0,
        check=_resumes_exactly,
    ),
    Scenario(
        name="resume-skips-long-prompts",
        elsewhere="NeMo-RL #3599, #3066: about 30 % of the prompts reached are skipped on resume, the long ones first",
        here="prompts in flight at a resume are issued again: none is skipped, none is trained twice",
        plan=Plan(
            steps=20,
            work=Work(spread=0.9),
            faults=(
                Fault(5.0, "slow", W0, for_s=20.0, amount=5.0),
                Fault(12.0, "power_off", for_s=5.0),
                Fault(30.0, "power_off", for_s=5.0),
            ),
        ),
        struck_s=12.0,
        says="resumed at step",
        within_s=10.0,
        check=_resumes_exactly,
    ),
    Scenario(
        name="accounting-on-resume",
        elsewhere="OpenRLHF #1322, AReaL #1388, TRL #7035: accounting and resume",
        here="controller and trainer killed together, twice: the journal and the checkpoint agree on every prompt",
        plan=Plan(
            steps=20,
            faults=(
                Fault(8.0, "kill", TRAINER),
                Fault(8.1, "kill", CONTROLLER),
                Fault(18.0, "kill", CONTROLLER),
                Fault(18.3, "kill", TRAINER),
            ),
        ),
        struck_s=8.0,
        says="controller ended (killed by SIGKILL)",
        within_s=1.0,
        check=_resumes_exactly,
    ),
    Scenario(
        name="wrong-weights-claimed",
        elsewhere="SkyRL #2246: a cache flag silently ignored, stale keys trained on, gradient norm 8 → 136",
        here="a sample contains the digest of its weights; a sample with an unpublished digest is refused",
        plan=Plan(steps=20, faults=(Fault(8.0, "lie", W0, for_s=5.0),)),
        struck_s=8.0,
        says="samples of p0.rollout.0",
        within_s=5.0,
        check=lambda report: bool(report.refused) and _pipeline(report)["samples_wrong_weights"] > 0,
    ),
    Scenario(
        name="uninitialised-memory",
        elsewhere="tokenspeed #1373: 200 OK, uninitialised memory loaded",
        here="the digest of the memory that will serve is verified before serving; damaged bytes are refused",
        plan=Plan(steps=20, faults=(Fault(8.0, "damage_weights", for_s=4.0),)),
        struck_s=8.0,
        says="update failed at step",
        within_s=5.0,
    ),
    Scenario(
        name="serves-before-weights",
        elsewhere="miles #1724: a recovered engine serves before its weights arrive",
        here="an engine that was started again is fenced until it holds a verified version, however long that takes",
        plan=Plan(steps=20, work=Work(fetch_weights_s=8.0), faults=(Fault(20.0, "kill", W0), Fault(45.0, "kill", W1))),
        struck_s=20.0,
        says="p0.rollout.0 ended (killed by SIGKILL)",
        within_s=1.0,
    ),
    Scenario(
        name="flaky-engine-for-ever",
        elsewhere="NeMo-RL #3613, #2244: a flaky engine restarted indefinitely",
        here="a worker that cannot start is retried with growing pauses; then the run fails with one message",
        plan=Plan(steps=400, faults=(Fault(10.0, "cannot_start", W0),)),
        struck_s=10.0,
        says="cannot be built",
        within_s=5.0,
        ends="times in a row",
    ),
    Scenario(
        name="full-disk",
        elsewhere="",
        here="nothing is acknowledged that is not written; the run fails with one message and can be resumed",
        plan=Plan(steps=400, faults=(Fault(10.0, "full_disk", for_s=1000.0),)),
        struck_s=10.0,
        says="disk",
        within_s=5.0,
        ends="disk",
    ),
    Scenario(
        name="power-failure",
        elsewhere="",
        here="the journal is flushed before a checkpoint is written: ten steps a second, and none is ahead of it",
        plan=Plan(
            steps=60,
            work=Work(sample_s=0.1, step_s=0.05, publish_s=0.01, fetch_weights_s=0.01, save_s=0.01),
            faults=(Fault(5.05, "power_off", for_s=2.0),),
            settings={"pipeline.checkpoint.every_steps": 1},
        ),
        struck_s=5.05,
        says="resumed at step",
        within_s=5.0,
        check=_resumes_exactly,
    ),
    Scenario(
        name="lying-disk",
        elsewhere="",
        here="data that the disk reported as flushed and lost is named; the run resumes from the last whole checkpoint",
        plan=Plan(
            steps=30,
            faults=(Fault(11.0, "lying_disk", for_s=6.0), Fault(13.0, "power_off", for_s=2.0)),
            settings={"pipeline.checkpoint.every_steps": 3},
        ),
        struck_s=13.0,
        says="is damaged",
        within_s=10.0,
        check=lambda report: bool(report.lost),
    ),
    Scenario(
        name="nothing-learned",
        elsewhere="sparse rewards on a pretrained model: the first steps change no byte",
        here="a version with the same bytes as the previous one is loaded as a new version",
        plan=Plan(steps=20, work=Work(equal_bytes=1.0, equal_rewards=1.0)),
    ),
    Scenario(
        name="split-network",
        elsewhere="",
        here="an unreachable worker is evicted and its leases issued again; when it reconnects it is refused",
        plan=Plan(steps=40, faults=(Fault(10.0, "cut", W0, for_s=30.0),)),
        struck_s=10.0,
        says="evicted",
        within_s=20.0,
    ),
]


def scenarios_in(path: Path) -> list[Scenario]:
    """The scenarios of a user's file, in Python or in TOML."""
    try:
        found = _from_toml(path) if path.suffix == ".toml" else runpy.run_path(str(path)).get("SCENARIOS")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, list) or not all(isinstance(one, Scenario) for one in found):
        raise ConfigError(f"{path} must define SCENARIOS, a list of penstock.sim.scenarios.Scenario")
    for one in found:
        _check(path, one)
    return found


def _from_toml(path: Path) -> list[Scenario]:
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
        unknown = tables.keys() - {"scenario"}
        if unknown or not tables:
            raise ConfigError(f"{path} must have tables [[scenario]], found {sorted(unknown) or 'none'}")
        return msgspec.convert(tables["scenario"], list[Scenario], dec_hook=_refuse)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _refuse(kind: Any, value: Any) -> Any:
    raise ValueError("this field can only be written in Python")


def _check(path: Path, scenario: Scenario) -> None:
    """A fault of an unknown kind, or of a process that the run does not have, would have no effect."""
    plan = scenario.plan
    processes = ["controller", *trainers_of(plan), *workers_of(plan)] if plan.config is None else []
    for fault in plan.faults:
        if fault.what not in KINDS:
            raise ConfigError(
                f"{path}: {scenario.name}: there is no fault {fault.what!r}; there are: {', '.join(sorted(KINDS))}"
            )
        if fault.target and processes and fault.target.removesuffix(".heart") not in processes:
            raise ConfigError(
                f"{path}: {scenario.name}: there is no process {fault.target!r}; there are: {', '.join(processes)}"
            )


def scenario_called(name: str) -> Scenario:
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise ConfigError(f"there is no scenario {name!r}; there are: {', '.join(one.name for one in SCENARIOS)}")
