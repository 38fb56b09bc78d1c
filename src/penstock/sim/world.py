"""A whole pipeline in virtual time: the real control machine, simulated processes, seeded faults.

    report = simulate(SimSettings(steps=1000))
    report = simulate(SimSettings(steps=200, seed=7, faults=Faults.everything()))

A broken promise raises InvalidTransition, a run that does not finish raises RunFailed with the controller's own
diagnosis; both are reproduced exactly by the same settings.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from penstock.control import effects, events
from penstock.control.ledger import GroupFilter
from penstock.control.settings import PipelineSettings
from penstock.errors import RunFailed
from penstock.records.ids import MemberId, PipelineName
from penstock.sim.actors import Lineage, Pace, SimTrainer, SimWorker
from penstock.sim.desk import SimDesk
from penstock.sim.engine import Engine
from penstock.sim.faults import FaultLog, Faults
from penstock.sim.invariants import Watch, check_end


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


class World:
    def __init__(self, settings: SimSettings, group_filter: GroupFilter | None = None) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.engine = Engine()
        self.faults = FaultLog(settings.faults, self.random)
        self.watch = Watch(settings.check_every, settings.max_staleness)
        self.lineage = Lineage()
        self.failure = ""
        self.workers: dict[int, SimWorker] = {}
        self._members: dict[str, int] = {}
        """Which seat (worker number, or -1 for the trainer) a member belongs to."""
        self._incarnation = 0
        self._worker_busy_s = self._trainer_busy_s = 0.0
        control = PipelineSettings(
            name=PipelineName("sim"),
            steps=settings.steps,
            prompt_limit=settings.prompt_limit,
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            max_staleness=settings.max_staleness,
            straggler_wait_s=settings.straggler_wait_s,
            wedge_after_s=60.0,
            stall_fail_after_s=None,
        )
        self.desk = SimDesk(
            self.engine,
            control,
            self.faults,
            self.random,
            network_s=settings.network_s,
            group_filter=group_filter,
            on_effect=self._carry_out,
            on_answer=lambda event, answer: self.watch.saw(self.desk.control, event, answer),
        )
        for seat in range(settings.workers):
            self._start_worker(seat)
        self.trainer = self._start_trainer()
        self._plan_faults()

    def run(self) -> SimReport:
        """Runs to completion and audits the end."""
        settings = self.settings
        self.engine.run(self._over, settings.max_virtual_s, lambda: self.desk.control.diagnose(self.engine.now))
        if self.failure or not self._over():
            raise RunFailed(self.failure or "the simulation ran out of events")
        control = self.desk.control
        check_end(control, self.lineage.prompts)
        books, elapsed_s = control.ledger.state, max(self.engine.now, 1e-9)
        for worker in self.workers.values():
            self._worker_busy_s += worker.busy_s
        return SimReport(
            seed=settings.seed,
            steps=books.version,
            virtual_s=self.engine.now,
            events=self.engine.handled,
            revisions=control.revision,
            samples_trained=books.counts["trained"],
            samples_per_s=books.counts["trained"] / elapsed_s,
            trainer_busy=(self._trainer_busy_s + self.trainer.busy_s) / elapsed_s,
            workers_busy=self._worker_busy_s / (elapsed_s * settings.workers * settings.concurrency),
            dropped={str(reason): count for reason, count in books.dropped.items()},
            set_aside=len(books.set_aside),
            staleness=dict(sorted(self.watch.staleness.items())),
            faults=dict(sorted(self.faults.fired.items())),
            controller_restarts=self.desk.restarts,
            audits=self.watch.checks,
        )

    def _over(self) -> bool:
        return bool(self.failure) or (self.trainer.done and self.desk.up and self.desk.control.phase == "complete")

    # -- the supervisor -----------------------------------------------------------------------------------------

    def _start_worker(self, seat: int) -> None:
        settings = self.settings
        slow = settings.faults.slow_factor if seat < settings.faults.slow_workers else 1.0
        self._incarnation += 1
        name = f"worker{seat}.{self._incarnation}"
        self._members[name] = seat
        self.workers[seat] = SimWorker(
            self.engine, name, self.random, self.faults, settings.pace, concurrency=settings.concurrency, slow=slow
        )

    def _start_trainer(self) -> SimTrainer:
        self._incarnation += 1
        name = f"trainer.{self._incarnation}"
        self._members[name] = -1
        self.trainer = SimTrainer(
            self.engine,
            name,
            self.lineage,
            self.faults,
            self.settings.pace,
            checkpoint_every=self.settings.checkpoint_every,
            living=self._is_living,
        )
        return self.trainer

    def _is_living(self, member: str) -> bool:
        worker = self.workers.get(self._members[member])
        return worker is not None and worker.member == member and worker.owner.alive

    def _carry_out(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.FailRun):
            self.failure = effect.sentence
        elif isinstance(effect, effects.EvictMember):
            self._replace(effect.member)

    def _replace(self, member: str) -> None:
        """Ends a process for certain, if it is the present holder of its seat, and starts another in its place."""
        seat = self._members[member]
        if seat == -1 and self.trainer.member == member and not self.trainer.done:
            self._kill_trainer()
        elif seat >= 0 and self.workers[seat].member == member:
            self._kill_worker(seat)

    def _kill_worker(self, seat: int) -> None:
        worker = self.workers[seat]
        worker.owner.alive = False
        self._worker_busy_s += worker.busy_s
        worker.busy_s = 0.0
        self.engine.after(self.settings.faults.restart_s, self._restart_worker, seat, worker)

    def _restart_worker(self, seat: int, former: SimWorker) -> None:
        if self.workers[seat] is former:
            self._start_worker(seat)

    def _kill_trainer(self) -> None:
        trainer = self.trainer
        trainer.owner.alive = False
        self._trainer_busy_s += trainer.busy_s
        trainer.busy_s = 0.0
        self.engine.after(self.settings.faults.restart_s, self._restart_trainer, trainer)

    def _restart_trainer(self, former: SimTrainer) -> None:
        if self.trainer is former:
            self._perhaps_damage_checkpoint()
            self._start_trainer()

    # -- faults -------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        faults = self.settings.faults
        self._recurring(faults.kill_worker_every_s, self._strike_worker)
        self._recurring(faults.wedge_worker_every_s, self._strike_wedge)
        self._recurring(faults.mute_worker_every_s, self._strike_mute)
        self._recurring(faults.kill_trainer_every_s, self._strike_trainer)
        self._recurring(faults.kill_controller_every_s, self._strike_controller)
        self._recurring(faults.resume_every_s, self._strike_all)
        self._supervise()

    def _recurring(self, every_s: float, strike: Callable[[], None]) -> None:
        if every_s <= 0:
            return

        def again() -> None:
            if self.engine.now > self.settings.faults.until_s:
                return
            strike()
            self.engine.after(self.random.expovariate(1 / every_s), again)

        self.engine.after(self.random.expovariate(1 / every_s), again)

    def _strike_worker(self) -> None:
        seat = self.random.randrange(self.settings.workers)
        worker = self.workers[seat]
        if worker.owner.alive and not worker.retired:
            self.faults.count("worker killed")
            self._kill_worker(seat)
            self._perhaps_report(worker.member)

    def _strike_wedge(self) -> None:
        worker = self.workers[self.random.randrange(self.settings.workers)]
        if worker.owner.alive and not worker.retired and not worker.owner.wedged:
            self.faults.count("worker wedged")
            worker.owner.wedged = True

    def _strike_mute(self) -> None:
        worker = self.workers[self.random.randrange(self.settings.workers)]
        if worker.owner.alive and not worker.muted:
            self.faults.count("heartbeat muted")
            worker.muted = True

    def _strike_trainer(self) -> None:
        if self.trainer.owner.alive and not self.trainer.done:
            self.faults.count("trainer killed")
            self._kill_trainer()
            self._perhaps_report(self.trainer.member)

    def _strike_controller(self) -> None:
        if self.desk.up:
            self.desk.kill(self.settings.faults.controller_down_s)

    def _strike_all(self) -> None:
        if not self.desk.up or self.trainer.done:
            return
        self.faults.count("run resumed")
        for seat in self.workers:
            self._kill_worker(seat)
        self._kill_trainer()
        self.desk.happen(events.RunResumed())

    def _perhaps_damage_checkpoint(self) -> None:
        """Not that of a complete run: workers have left, nobody could generate its samples again."""
        chance = self.settings.faults.damage_checkpoint
        if self.desk.control.phase != "complete" and self.random.random() < chance and self.lineage.damage():
            self.faults.count("checkpoint damaged")

    def _perhaps_report(self, member: str) -> None:
        """The supervisor sees an exit at once, and says so, if the controller can hear it."""
        if self.desk.up and self.random.random() < self.settings.faults.exits_seen:
            self.desk.happen(events.MemberLeft(MemberId(member), "killed", died=True))

    def _supervise(self) -> None:
        """Restarts processes that ended by themselves because the controller no longer knew them."""
        for seat, worker in self.workers.items():
            if not worker.owner.alive and not worker.retired:
                self._kill_worker(seat)
        if not self.trainer.owner.alive and not self.trainer.done:
            self._kill_trainer()
        self.engine.after(5.0, self._supervise)


def simulate(settings: SimSettings, group_filter: GroupFilter | None = None) -> SimReport:
    """Runs one pipeline from start to completion in virtual time."""
    return World(settings, group_filter).run()
