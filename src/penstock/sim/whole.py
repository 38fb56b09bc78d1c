"""The whole system in virtual time: every machine of a run, several pipelines on one pool, seeded faults everywhere.

    report = simulate_whole(WholeSettings(steps=100))
    report = simulate_whole(WholeSettings(steps=100, pipelines=2, seed=7, faults=WholeFaults.everything()))

Control, weights, generation, payloads and the pool are decided by the same objects as in a real run; only time, memory,
disks and wires are simulated. A broken promise raises InvalidTransition, a run that does not come to its end raises
RunFailed; both are reproduced exactly by the same settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from penstock.control import effects, events
from penstock.errors import RunFailed
from penstock.records.ids import MemberId, PipelineName
from penstock.records.weights import NOTHING_HELD
from penstock.rollout.prefetch import Bounds
from penstock.sim.actors import Lineage
from penstock.sim.engine import Call, Engine, Owner, Process
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.sim.fetching import SimFetcher
from penstock.sim.front_desk import FrontDesk
from penstock.sim.invariants import Truth, Watch, check_end, check_slots
from penstock.sim.pool_host import SimPoolHost
from penstock.sim.replica import Artifacts
from penstock.sim.rings import TRAINERS_HOST, SimRing
from penstock.sim.scoring import Points
from penstock.sim.supervisor import Supervisor
from penstock.sim.trainer import WholeTrainer
from penstock.sim.worker import WholeWorker, WorkerShape
from penstock.sim.world import SimSettings, control_settings
from penstock.wire import messages

EVICTED_GRACE_S = 3.0
"""Whoever was given up lives on for so long before it is ended."""
SETTLE_S = 1800.0
"""After training is complete and no fault strikes any more, everything must come to rest within this time."""


class WholeSettings(SimSettings, frozen=True, kw_only=True):
    steps: int | None = 50
    pipelines: int = 1
    devices: int = 0
    """In the pool, for all pipelines; 0: one for every worker and every trainer."""
    batches: int = 4
    """In one engine at once; `concurrency` samples are divided among them."""
    in_place: float = 0.5
    """Share of the workers that overwrite their weights in place."""
    remote: float = 0.5
    """Share of the workers on another host than the trainer."""
    ring_slots: int = 256
    ports: int = 2
    faults: WholeFaults = WholeFaults()


class WholeReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    pipelines: int
    steps: int
    virtual_s: float
    events: int
    samples_trained: int
    dropped: dict[str, int]
    set_aside: int
    staleness: dict[int, int]
    faults: dict[str, int]
    """How often each fault really fired."""
    controller_restarts: int
    audits: int
    decode_looks: int
    """Decode boundaries at which an engine's memory was compared with what was published."""
    payloads_read: int
    """Payloads compared with the sample they should be."""
    payload_calls: int
    """Made over the network by the last trainer of each pipeline."""
    weight_updates: int
    """Since the controller's last start."""
    evaluated: int
    """Versions."""
    evaluations_skipped: dict[str, int]
    moves: int
    """Wakes and sleeps ordered by the pool."""
    turns: dict[str, int]
    """Of trainers on the pool's devices, by class."""
    promises_withdrawn: int


class PipelineRun:
    """One pipeline: its desk, its processes, its run directory, and the truth about it."""

    def __init__(self, world: WholeWorld, name: str, *, scores: bool) -> None:
        settings = world.settings
        self.name = PipelineName(name)
        self.scores = scores
        self.world = world
        self.artifacts = Artifacts()
        self.lineage = Lineage()
        self.watch = Watch(settings.check_every, settings.max_staleness)
        self.truth = Truth(self.artifacts)
        self.points = Points(settings.evaluation)
        self.rings: dict[str, SimRing] = {}
        self.desk = FrontDesk(
            world.pool,
            world.engine,
            control_settings(settings, self.name),
            world.faults,
            world.random,
            network_s=settings.network_s,
            on_effect=self._carry_out,
            on_answer=self._saw,
        )
        self.processes: Supervisor[WholeWorker, WholeTrainer] = Supervisor(
            world.engine,
            world.random,
            world.faults,
            self.desk,
            self.lineage,
            seats=settings.workers,
            make_worker=self._make_worker,
            make_trainer=self._make_trainer,
        )
        faults = settings.faults
        self.processes.recurring(faults.stop_worker_every_s, self._strike_stop)
        self.processes.recurring(faults.flip_prefetch_every_s, self._strike_flip)
        self.processes.recurring(faults.sick_port_every_s, self._strike_port)

    @property
    def over(self) -> bool:
        return self.processes.trainer.done and self.desk.up and self.desk.control.phase == "complete"

    def _make_worker(self, name: str, slow: float) -> WholeWorker:
        world, settings, random = self.world, self.world.settings, self.world.random
        batch_samples = max(1, settings.concurrency // settings.batches)
        shape = WorkerShape(
            bounds=Bounds(
                batch_samples=batch_samples,
                queue_samples=2 * batch_samples,
                concurrency=settings.batches,
                preparations=2,
            ),
            way="in_place" if random.random() < settings.in_place else "staged",
            host="host1" if random.random() < settings.remote else TRAINERS_HOST,
            prefetch=random.random() < 0.5,
            slow=slow,
            ring_slots=settings.ring_slots,
            ring_bytes=settings.ring_slots * 4096,
            ports=settings.ports,
        )
        worker = WholeWorker(
            world.engine,
            name,
            self.name,
            random,
            world.faults,
            settings.faults,
            settings.pace,
            shape,
            self.artifacts,
            world.pool.floor,
            lambda engine, updater: self.truth.decodes(engine, updater.replica),
        )
        self.rings[worker.ring.name] = worker.ring
        return worker

    def _make_trainer(self, name: str) -> WholeTrainer:
        world, settings = self.world, self.world.settings

        def make_fetcher(owner: Owner) -> SimFetcher:
            return SimFetcher(
                world.engine,
                owner,
                TRAINERS_HOST,
                world.random,
                world.faults,
                settings.faults,
                self.rings.__getitem__,
                settings.network_s,
            )

        return WholeTrainer(
            world.engine,
            name,
            self.name,
            self.lineage,
            self.artifacts,
            world.faults,
            settings.faults,
            settings.pace,
            checkpoint_every=settings.checkpoint_every,
            scores=self.scores,
            floor=world.pool.floor,
            make_fetcher=make_fetcher,
            trains=self.truth.trains,
        )

    def _saw(self, event: events.Event, answer: object) -> None:
        self.watch.saw(self.desk.control, event, answer)
        if isinstance(event, messages.Deliver) and isinstance(answer, messages.Delivered):
            self.truth.accepted(event, answer.refused)

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.FailRun(sentence=sentence):
                self.world.failure = sentence
            case effects.EvictMember(member=member, reason=reason):
                self.world.pool.evicted(member, reason)
                self.world.engine.after(EVICTED_GRACE_S, self.world.end_for_certain, self.name, member)
            case effects.ReleasePayloads(payloads=payloads):
                self.desk.release(payloads)
            case effects.NoteEvaluation(result=result):
                self.points.saw(result)

    # -- faults -------------------------------------------------------------------------------------------------

    def _strike_stop(self) -> None:
        worker = self.processes.any_worker()
        if worker.owner.alive and not worker.owner.wedged and not worker.retired:
            self.world.faults.count("worker stopped")
            worker.stop("asked to end")

    def _strike_flip(self) -> None:
        worker = self.processes.any_worker()
        if worker.owner.alive and not worker.owner.wedged and worker.flip_prefetch():
            self.world.faults.count("prefetch flipped")

    def _strike_port(self) -> None:
        random, ring = self.world.random, self.processes.any_worker().ring
        port = random.choice(list(ring.ports))
        if ring.ports[port] == "well":
            ring.ports[port] = random.choice(("refusing", "resetting", "silent"))
            self.world.faults.count(f"payload port {ring.ports[port]} for a while")
            heal_s = random.expovariate(1 / self.world.settings.faults.port_sick_for_s)
            self.world.engine.after(heal_s, ring.ports.__setitem__, port, "well")

    # -- the end ------------------------------------------------------------------------------------------------

    def unrest(self) -> str:
        """What has not come to rest yet; empty when nothing moves any more and every replica serves the newest."""
        newest = self.desk.fleet.transaction.newest
        wanted = newest.held if newest is not None else NOTHING_HELD
        for worker in self.processes.workers.values():
            if not worker.owner.alive or worker.owner.wedged:
                if not worker.retired or worker.owner.wedged:
                    return f"{worker.member} is not back yet"
                continue
            replica = worker.updater.replica
            if worker.updater.updating:
                return f"{worker.member} is updating its weights: {replica!r}"
            behind = not (replica.may_serve and replica.held == wanted)
            if worker.awake and behind and not self.artifacts.is_damaged(wanted):
                return f"{worker.member} is awake with {replica!r}, the newest weights are {newest}"
            if worker.awake and replica.may_serve and worker.engine.asleep:
                return f"the engine of {worker.member} was paused and never resumed: {replica!r}"
            if worker.runner is not None and worker.runner.finished is None:
                return f"{worker.member} still generates: {worker.runner.machine!r}"
            if any(state.name in ("WRITING", "READING") for state, _ in worker.ring.occupied().values()):
                return f"payloads are being written or read: {worker.ring!r}"
        return ""

    def check(self) -> None:
        """Nothing is lost or doubled, and no slot is leaked."""
        control = self.desk.control
        check_end(control, self.lineage.prompts)
        self.points.check_end(control)
        wanted = {ref for group in control.ledger.state.groups.values() for ref in group.payloads if ref is not None}
        wanted |= set(self.desk.discards.waiting())
        for worker in self.processes.workers.values():
            if worker.owner.alive:
                known = {*wanted, *worker.unread.tracked()}
                check_slots(worker.ring, {(ref.slot, ref.generation) for ref in known if ref.ring == worker.ring.name})


class WholeWorld:
    def __init__(self, settings: WholeSettings) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.engine = Engine()
        self.faults = FaultLog(settings.faults, self.random)
        self.failure = ""
        devices = settings.devices or settings.pipelines * (settings.workers + 1)
        apart = devices >= settings.pipelines * (settings.workers + 1)
        self.pool = SimPoolHost(devices, self._announce, self._fence, lambda: self.engine.now)
        self.pipelines: dict[str, PipelineRun] = {}
        for number in range(settings.pipelines):
            name = f"p{number}"
            inference = range(devices - settings.pipelines if apart else devices)
            first = (devices - 1 - number) % devices
            self.pool.open(PipelineName(name), inference, range(first, first + 1), settings.concurrency)
            self.pipelines[name] = PipelineRun(self, name, scores=number % 2 == 0)
        self.engine.place_call = self._route
        faults, anybody = settings.faults, next(iter(self.pipelines.values())).processes
        anybody.recurring(faults.kill_controller_every_s, self._strike_controller)
        anybody.recurring(faults.resume_every_s, self._strike_all)
        self._tick()

    def run(self) -> WholeReport:
        """Runs every pipeline to completion, lets the dust settle, and audits the end."""
        self._run_until(lambda: all(run.over for run in self.pipelines.values()), self.settings.max_virtual_s)
        finished_s = self.engine.now
        self.faults.calm = True
        self._run_until(lambda: not self._unrest(), finished_s + SETTLE_S)
        for run in self.pipelines.values():
            run.check()
        self.pool.pool.check()
        return self._report(finished_s)

    def _run_until(self, done: Callable[[], bool], until_s: float) -> None:
        self.engine.run(lambda: bool(self.failure) or done(), until_s, self._describe)
        if self.failure or not done():
            raise RunFailed(self.failure or "the simulation ran out of events")

    def _unrest(self) -> str:
        return next((unrest for run in self.pipelines.values() if (unrest := run.unrest())), "")

    def _describe(self) -> str:
        diagnoses = [run.desk.control.diagnose(self.engine.now) for run in self.pipelines.values() if not run.over]
        return " / ".join(diagnoses) or self._unrest()

    def _report(self, finished_s: float) -> WholeReport:
        runs = list(self.pipelines.values())
        books = [run.desk.control.ledger.state for run in runs]
        dropped, staleness = Counter[str](), Counter[int]()
        for run, state in zip(runs, books, strict=True):
            dropped.update({str(reason): count for reason, count in state.dropped.items()})
            staleness.update(run.watch.staleness)
        return WholeReport(
            seed=self.settings.seed,
            pipelines=len(runs),
            steps=sum(state.version for state in books),
            virtual_s=finished_s,
            events=self.engine.handled,
            samples_trained=sum(state.counts["trained"] for state in books),
            dropped=dict(dropped),
            set_aside=sum(len(state.set_aside) for state in books),
            staleness=dict(sorted(staleness.items())),
            faults=dict(sorted(self.faults.fired.items())),
            controller_restarts=runs[0].desk.restarts,
            audits=sum(run.watch.checks for run in runs),
            decode_looks=sum(run.truth.looks for run in runs),
            payloads_read=sum(run.truth.payloads for run in runs),
            payload_calls=sum(run.processes.trainer.fetcher.calls for run in runs),
            weight_updates=sum(run.desk.fleet.transaction.statistics.updates for run in runs),
            evaluated=sum(run.points.evaluated.total() for run in runs),
            evaluations_skipped=dict(sum((run.points.skipped for run in runs), Counter[str]())),
            moves=self.pool.pool.status(self.engine.now).moves,
            turns=dict(sorted(self.pool.turns.items())),
            promises_withdrawn=self.pool.withdrawn,
        )

    # -- the one controller -------------------------------------------------------------------------------------

    def _route(self, process: Process, call: Call) -> None:
        self.pipelines[process.owner.pipeline].desk.send(process, call)

    def _announce(self, name: PipelineName, topic: str) -> None:
        if name in self.pipelines:
            self.pipelines[name].desk.announce(topic)

    def _fence(self, name: PipelineName, member: MemberId) -> None:
        self.engine.after(1.0, self.end_for_certain, name, member)

    def end_for_certain(self, name: PipelineName, member: MemberId) -> None:
        run = self.pipelines[name]
        run.processes.replace(member)
        if run.desk.up:
            run.desk.happen(messages.Unregister(name, member, "fenced by the pool", died=True))
            self.pool.lost(member, "fenced")

    def _up(self) -> bool:
        return all(run.desk.up for run in self.pipelines.values())

    def _tick(self) -> None:
        if self._up():
            self.pool.tick({run.name: run.desk.control for run in self.pipelines.values()})
        self.engine.after(1.0, self._tick)

    def _strike_controller(self) -> None:
        if self._up():
            self.faults.count("controller killed")
            down_s = self.settings.faults.controller_down_s
            for run in self.pipelines.values():
                run.desk.kill(down_s)
            self.engine.after(down_s, self.pool.restart)

    def _strike_all(self) -> None:
        if not self._up() or any(run.processes.trainer.done for run in self.pipelines.values()):
            return
        self.faults.count("run resumed")
        for run in self.pipelines.values():
            run.processes.kill_all()
        self.pool.begin_another_life()


def simulate_whole(settings: WholeSettings) -> WholeReport:
    """Runs the whole system from start to completion in virtual time."""
    return WholeWorld(settings).run()
