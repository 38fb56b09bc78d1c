"""A whole pipeline in virtual time: the real control machine, simulated processes, seeded faults.

    report = simulate(SimSettings(steps=1000))
    report = simulate(SimSettings(steps=200, seed=7, faults=Faults.everything()))

A broken promise raises InvalidTransition, a run that does not finish raises RunFailed with the controller's own
diagnosis; both are reproduced exactly by the same settings.
"""

from __future__ import annotations

import math
from random import Random

import msgspec

from penstock.control import effects
from penstock.control.ledger import GroupFilter
from penstock.control.settings import EvaluationSection, PipelineSettings
from penstock.errors import RunFailed
from penstock.records.ids import PipelineName
from penstock.sim.actors import Lineage, Pace, SimTrainer, SimWorker
from penstock.sim.desk import SimDesk
from penstock.sim.engine import Engine
from penstock.sim.faults import FaultLog, Faults
from penstock.sim.invariants import Watch, check_end
from penstock.sim.scoring import Points
from penstock.sim.supervisor import Supervisor


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    steps: int | None = 100
    prompt_limit: int | None = None
    workers: int = 4
    concurrency: int = 16
    """Samples one worker generates at a time."""
    groups_per_step: int = 8
    group_size: int = 4
    max_staleness: int = 2
    straggler_wait_s: float = 0.0
    checkpoint_every: int = 10
    network_s: float = 0.002
    pace: Pace = Pace()
    evaluation: EvaluationSection = EvaluationSection()
    faults: Faults = Faults()
    check_every: int = 0
    """Audit the whole state after every so many events; 0: only at the end."""
    max_virtual_s: float = 1e6


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    steps: int
    virtual_s: float
    events: int
    revisions: int
    samples_trained: int
    samples_per_s: float
    """Trained samples per virtual second."""
    trainer_busy: float
    """Share of the time the trainer trained."""
    workers_busy: float
    dropped: dict[str, int]
    set_aside: int
    staleness: dict[int, int]
    """Histogram over the trained samples."""
    faults: dict[str, int]
    """How often each fault really fired."""
    controller_restarts: int
    audits: int
    evaluated: int
    """Versions."""
    evaluations_skipped: dict[str, int]
    """By the first words of the reason."""


class World:
    def __init__(self, settings: SimSettings, group_filter: GroupFilter | None = None) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.engine = Engine()
        self.faults = FaultLog(settings.faults, self.random)
        self.watch = Watch(settings.check_every, settings.max_staleness)
        self.points = Points(settings.evaluation)
        self.lineage = Lineage()
        self.failure = ""
        self.desk = SimDesk(
            self.engine,
            control_settings(settings, PipelineName("sim")),
            self.faults,
            self.random,
            network_s=settings.network_s,
            group_filter=group_filter,
            on_effect=self._carry_out,
            on_answer=lambda event, answer: self.watch.saw(self.desk.control, event, answer),
        )
        self.processes: Supervisor[SimWorker, SimTrainer] = Supervisor(
            self.engine,
            self.random,
            self.faults,
            self.desk,
            self.lineage,
            seats=settings.workers,
            make_worker=self._make_worker,
            make_trainer=self._make_trainer,
        )
        self.processes.recurring(settings.faults.kill_controller_every_s, self._strike_controller)
        self.processes.recurring(settings.faults.resume_every_s, self._strike_all)

    def run(self) -> SimReport:
        """Runs to completion and audits the end."""
        settings, processes = self.settings, self.processes
        self.engine.run(self._over, settings.max_virtual_s, lambda: self.desk.control.diagnose(self.engine.now))
        if self.failure or not self._over():
            raise RunFailed(self.failure or "the simulation ran out of events")
        control = self.desk.control
        check_end(control, self.lineage.prompts)
        self.points.check_end(control)
        books, elapsed_s = control.ledger.state, max(self.engine.now, 1e-9)
        worker_busy_s = processes.worker_busy_s + sum(worker.busy_s for worker in processes.workers.values())
        trainer_busy_s = processes.trainer_busy_s + processes.trainer.busy_s
        return SimReport(
            seed=settings.seed,
            steps=books.version,
            virtual_s=self.engine.now,
            events=self.engine.handled,
            revisions=control.revision,
            samples_trained=books.counts["trained"],
            samples_per_s=books.counts["trained"] / elapsed_s,
            trainer_busy=trainer_busy_s / elapsed_s,
            workers_busy=worker_busy_s / (elapsed_s * settings.workers * settings.concurrency),
            dropped={str(reason): count for reason, count in books.dropped.items()},
            set_aside=len(books.set_aside),
            staleness=dict(sorted(self.watch.staleness.items())),
            faults=dict(sorted(self.faults.fired.items())),
            controller_restarts=self.desk.restarts,
            audits=self.watch.checks,
            evaluated=self.points.evaluated.total(),
            evaluations_skipped=dict(self.points.skipped),
        )

    def _over(self) -> bool:
        over = self.processes.trainer.done and self.desk.up and self.desk.control.phase == "complete"
        return bool(self.failure) or over

    def _make_worker(self, name: str, slow: float) -> SimWorker:
        settings = self.settings
        return SimWorker(
            self.engine, name, self.random, self.faults, settings.pace, concurrency=settings.concurrency, slow=slow
        )

    def _make_trainer(self, name: str) -> SimTrainer:
        return SimTrainer(
            self.engine,
            name,
            self.lineage,
            self.faults,
            self.settings.pace,
            checkpoint_every=self.settings.checkpoint_every,
            living=lambda member: self.processes.is_living(member),
        )

    def _carry_out(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.FailRun):
            self.failure = effect.sentence
        elif isinstance(effect, effects.EvictMember):
            self.processes.replace(effect.member)
        elif isinstance(effect, effects.NoteEvaluation):
            self.points.saw(effect.result)

    def _strike_controller(self) -> None:
        if self.desk.up:
            self.faults.count("controller killed")
            self.desk.kill(self.settings.faults.controller_down_s)

    def _strike_all(self) -> None:
        if self.desk.up and not self.processes.trainer.done:
            self.faults.count("run resumed")
            self.processes.kill_all()


def control_settings(settings: SimSettings, name: PipelineName) -> PipelineSettings:
    return PipelineSettings(
        name=name,
        steps=settings.steps,
        prompt_limit=settings.prompt_limit,
        groups_per_step=settings.groups_per_step,
        group_size=settings.group_size,
        workers=settings.workers,
        max_staleness=settings.max_staleness,
        straggler_wait_s=settings.straggler_wait_s,
        wedged_after_s=60.0,
        stall_fail_after_s=math.inf,
        evaluation=settings.evaluation,
    )


def simulate(settings: SimSettings, group_filter: GroupFilter | None = None) -> SimReport:
    """Runs one pipeline from start to completion in virtual time."""
    return World(settings, group_filter).run()
