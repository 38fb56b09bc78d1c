"""The simulated supervisor of one pipeline: starts its processes, ends them when a fault wants it, starts others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Generic, Protocol, TypeVar

from penstock.control import events
from penstock.records.ids import MemberId
from penstock.sim.actors import Lineage
from penstock.sim.desk import SimDesk
from penstock.sim.engine import Engine, Owner
from penstock.sim.faults import FaultLog
from penstock.wire import messages

TRAINER = -1
"""The trainer's seat; the workers' are counted from 0."""


class Worker(Protocol):
    owner: Owner
    member: MemberId
    busy_s: float
    retired: bool
    """Told that nothing will ever be issued again."""
    muted: bool


class Trainer(Protocol):
    owner: Owner
    member: MemberId
    busy_s: float
    done: bool


W = TypeVar("W", bound=Worker)
T = TypeVar("T", bound=Trainer)


class Supervisor(Generic[W, T]):
    def __init__(
        self,
        engine: Engine,
        random: Random,
        faults: FaultLog,
        desk: SimDesk,
        lineage: Lineage,
        *,
        seats: int,
        make_worker: Callable[[str, float], W],
        make_trainer: Callable[[str], T],
    ) -> None:
        """`make_worker` is given a name and how many times slower than others it is, `make_trainer` a name."""
        self.engine = engine
        self.desk = desk
        self.lineage = lineage
        self.workers: dict[int, W] = {}
        self.worker_busy_s = self.trainer_busy_s = 0.0
        """Of processes that have ended."""
        self._random = random
        self._log = faults
        self._faults = faults.faults
        self._seats = seats
        self._make_worker = make_worker
        self._make_trainer = make_trainer
        self._members: dict[str, int] = {}
        """Which seat a member has or had."""
        self._incarnation = 0
        for seat in range(seats):
            self._start_worker(seat)
        self.trainer: T = make_trainer(self._name("trainer", TRAINER))
        self._plan_faults()

    def is_living(self, member: str) -> bool:
        worker = self.workers.get(self._members[member])
        return worker is not None and worker.member == member and worker.owner.alive

    def replace(self, member: str) -> None:
        """Ends a process for certain, if it is the present holder of its seat, and starts another in its place."""
        seat = self._members[member]
        if seat == TRAINER and self.trainer.member == member and not self.trainer.done:
            self.kill_trainer()
        elif seat >= 0 and self.workers[seat].member == member:
            self.kill_worker(seat)

    def kill_worker(self, seat: int) -> None:
        worker = self.workers[seat]
        worker.owner.alive = False
        self.worker_busy_s += worker.busy_s
        worker.busy_s = 0.0
        self.engine.after(self._faults.restart_s, self._restart_worker, seat, worker)

    def kill_trainer(self) -> None:
        trainer = self.trainer
        trainer.owner.alive = False
        self.trainer_busy_s += trainer.busy_s
        trainer.busy_s = 0.0
        self.engine.after(self._faults.restart_s, self._restart_trainer, trainer)

    def recurring(self, every_s: float, strike: Callable[[], None]) -> None:
        """Strikes at random times, so many seconds apart on average, for as long as faults last."""
        if every_s <= 0:
            return

        def again() -> None:
            if self.engine.now > self._faults.until_s or self._log.calm:
                return
            strike()
            self.engine.after(self._random.expovariate(1 / every_s), again)

        self.engine.after(self._random.expovariate(1 / every_s), again)

    def any_worker(self) -> W:
        return self.workers[self._random.randrange(self._seats)]

    def _name(self, role: str, seat: int) -> str:
        self._incarnation += 1
        name = f"{self.desk.settings.name}.{role}.{self._incarnation}"
        self._members[name] = seat
        return name

    def _start_worker(self, seat: int) -> None:
        slow = self._faults.slow_factor if seat < self._faults.slow_workers else 1.0
        self.workers[seat] = self._make_worker(self._name(f"worker{seat}", seat), slow)

    def _restart_worker(self, seat: int, former: W) -> None:
        if self.workers[seat] is former:
            self._start_worker(seat)

    def _restart_trainer(self, former: T) -> None:
        if self.trainer is former:
            self._perhaps_damage_checkpoint()
            self.trainer = self._make_trainer(self._name("trainer", TRAINER))

    # -- faults -------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        faults = self._faults
        self.recurring(faults.kill_worker_every_s, self._strike_worker)
        self.recurring(faults.wedge_worker_every_s, self._strike_wedge)
        self.recurring(faults.mute_worker_every_s, self._strike_mute)
        self.recurring(faults.kill_trainer_every_s, self._strike_trainer)
        self._supervise()

    def _strike_worker(self) -> None:
        if not self._seats:
            return
        seat = self._random.randrange(self._seats)
        worker = self.workers[seat]
        if worker.owner.alive and not worker.retired:
            self._log.count("worker killed")
            self.kill_worker(seat)
            self._perhaps_report(worker.member)

    def _strike_wedge(self) -> None:
        worker = self.any_worker()
        known = self.desk.control.members.get(worker.member) is not None
        if known and worker.owner.alive and not worker.retired and not worker.owner.wedged:
            self._log.count("worker wedged")
            worker.owner.wedged = True

    def _strike_mute(self) -> None:
        worker = self.any_worker()
        if worker.owner.alive and not worker.muted:
            self._log.count("heartbeat muted")
            worker.muted = True

    def _strike_trainer(self) -> None:
        if self.trainer.owner.alive and not self.trainer.done:
            self._log.count("trainer killed")
            self.kill_trainer()
            self._perhaps_report(self.trainer.member)

    def kill_all(self) -> None:
        """As when the supervisor itself dies and the run is resumed."""
        for seat in self.workers:
            self.kill_worker(seat)
        if not self.trainer.done:
            self.kill_trainer()
        self.desk.happen(events.RunResumed())

    def _perhaps_damage_checkpoint(self) -> None:
        """Not that of a complete run: workers have left, nobody could generate its samples again."""
        complete = self.desk.control.phase == "complete"
        if not complete and self._random.random() < self._faults.damage_checkpoint and self.lineage.damage():
            self._log.count("checkpoint damaged")

    def _perhaps_report(self, member: str) -> None:
        """The supervisor sees an exit at once, and says so, if the controller can hear it."""
        if self.desk.up and self._random.random() < self._faults.exits_seen:
            self.desk.happen(messages.Unregister(self.desk.settings.name, MemberId(member), "killed", died=True))

    def _supervise(self) -> None:
        """Restarts processes that ended by themselves."""
        for seat, worker in self.workers.items():
            if not worker.owner.alive and not worker.retired:
                self.kill_worker(seat)
        if not self.trainer.owner.alive and not self.trainer.done:
            self.kill_trainer()
        self.engine.after(5.0, self._supervise)
