"""The replicas of one pipeline, as the controller tracks them: versions, deadlines, and the actions on faults.

Promises, checked by `check`:

- only the newest version is ever offered, and each replica has at most one offer open: there is no queue;
- a replica is admitted (may lease, may deliver) only while it reports SERVING a version with the digest published
  for it;
- there is no barrier: replicas update independently, and a failure affects only its replica;
- every open offer and every fenced replica has a deadline;
- admission is stopped only while no replica is admitted, unless the run failed;
- a replica that serves is not evicted while fewer than `min_healthy` others do, unless the whole fleet is restarted.

The machine receives the members (`MembershipReconciled`) before requests for weights, so it never addresses a dead
one. It can be rebuilt from an empty state: replicas report again, and the newest manifest is published again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.errors import LocalProtocolError
from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.weights.events import (
    AdmitReplica,
    CheckpointTrainer,
    EvictReplica,
    FailRun,
    FenceReplica,
    MembershipReconciled,
    NewestHeld,
    OfferVersion,
    OpenAdmission,
    ReplicaReported,
    RestartFleet,
    RestartTrainer,
    StopAdmission,
    Ticked,
    TrainerLeft,
    TrainerLost,
    TrainerReturned,
    TransactionEffect,
    TransactionEvent,
    VersionMadeDurable,
    VersionPublished,
    WarnAboutReplica,
    WeightsRequested,
)
from penstock.weights.faults import Action, Fault, decide
from penstock.weights.fleet import ReplicaRecord, TransactionStatistics, metrics_of
from penstock.weights.published import PublishedVersions
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection

OWN_DAMAGE = 3
"""Publications in a row that one replica may find damaged although others serve them, before it is at fault."""


class WeightTransaction:
    """Decides; the controller acts. Pass every event with its time, carry out every effect in order."""

    def __init__(self, settings: WeightsSection, published: Callable[[], PublishedVersions]) -> None:
        """`published` returns the pipeline's table of digests; it has every version before its `VersionPublished`."""
        self.settings = settings
        self._published_versions = published
        self.newest: Manifest | None = None
        self.durable: Manifest | None = None
        self.replicas: dict[MemberId, ReplicaRecord] = {}
        self.statistics = TransactionStatistics()
        self.trainer_lost = False
        self.fleet_failures = 0
        """How often in a row every replica failed to load the newest version."""
        self.fleet_restarts = 0
        self.admission_stopped = False
        self.checkpoint_reason = ""
        """Why the trainer should save its state and publish it again; empty once it has."""
        self.failed = ""
        self._retired: set[str] = set()
        """Lineages of trainers that were replaced."""
        self._restarted = 0
        """Replicas that were restarted together: failures of the first to return do not count as failures of all."""
        self._substitute = ""
        """Digest of the durable version that a restarted fleet loads first: that does not show that newer ones load."""
        self._source_lost = False
        """The trainer that served the versions is gone: load failures do not count until a version is published."""
        self._unhealthy_s = 0.0
        self._health_checked_at: float | None = None

    # Queries

    def expects(self, version: Version, digest: str) -> bool:
        """Whether these are weights that were published."""
        return self._published_versions().has(version, digest)

    @property
    def healthy(self) -> int:
        return sum(replica.admitted for replica in self.replicas.values())

    def behind(self) -> dict[MemberId, int]:
        """Versions between the one each replica serves and the newest: the whole backlog."""
        if self.newest is None:
            return {}
        newest = self.newest.version
        return {member: max(0, newest - max(0, r.version)) for member, r in self.replicas.items()}

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.replicas.values(), list(self.behind().values()), self.statistics) | {
            "weights_admission_stopped": int(self.admission_stopped),
            "weights_checkpoint_wanted": int(bool(self.checkpoint_reason)),
            "weights_trainer_lost": int(self.trainer_lost),
        }

    # Events

    def handle(self, event: TransactionEvent, now: float) -> list[TransactionEffect]:
        match event:
            case VersionPublished():
                effects = self._published(event, now)
            case VersionMadeDurable():
                if self.newest is not None and self.newest.held == event.held:
                    self.durable = self.newest
                effects = []
            case TrainerLost():
                effects = self._trainer_lost(event)
            case TrainerLeft():
                self._source_lost = True
                effects = []
            case TrainerReturned():
                self.trainer_lost = False
                effects = []
            case MembershipReconciled():
                effects = self._reconciled(event, now)
            case WeightsRequested():
                effects = self._asked(event, now)
            case NewestHeld():
                self.replicas.setdefault(event.member, ReplicaRecord(since=now)).requested = True
                effects = self._record_held(event, now)
            case ReplicaReported():
                effects = self._reported(event, now)
            case Ticked(excused):
                effects = [*self._warn_behind(excused, now), *self._ticked(now)]
        if self.failed and not isinstance(event, Ticked):
            return [effect for effect in effects if not isinstance(effect, OfferVersion)]
        return effects

    def _published(self, event: VersionPublished, now: float) -> list[TransactionEffect]:
        manifest = event.manifest
        if event.durable:
            self.durable, self.checkpoint_reason = manifest, ""
        newest = self.newest
        if manifest.lineage in self._retired:
            return []  # from a trainer that was replaced since
        if newest is not None and manifest.lineage == newest.lineage and manifest.version < newest.version:
            return []  # a late repetition
        if newest is not None and manifest.lineage != newest.lineage:
            self._retired.add(newest.lineage)
        if newest is None or newest.held != manifest.held:
            self.statistics.published += 1
        self.newest = manifest
        self.trainer_lost = self._source_lost = False
        effects: list[TransactionEffect] = []
        for member, replica in self.replicas.items():
            replica.damaged = None
            effects.extend(self._offer(member, now))
        return effects

    def _asked(self, event: WeightsRequested, now: float) -> list[TransactionEffect]:
        replica = self.replicas.setdefault(event.member, ReplicaRecord(since=now))
        replica.requested = replica.waiting = True
        # A new request ends an offer: either it was taken and reported, or the answer was lost.
        replica.offered = ""
        return [*self._record_held(event, now), *self._offer(event.member, now, event.held)]

    def _record_held(self, event: WeightsRequested | NewestHeld, now: float) -> list[TransactionEffect]:
        """Records the version that a request states, as a report does: after a restart it may be the first record."""
        replica, held = self.replicas[event.member], event.held
        serving = replica.state is ReplicaState.SERVING
        if replica.evicting or (serving and held == replica.held) or (not serving and not held.digest):
            return []
        if held.digest and not self.expects(held.version, held.digest):
            return []  # not in the table of digests; the newest version is offered next
        replica.state = ReplicaState.SERVING if held.digest else ReplicaState.STALE
        replica.digest, replica.since = held.digest, now
        replica.version = held.version if held.digest else replica.version
        return self._admission(event.member)

    def _offer(self, member: MemberId, now: float, held: Held | None = None) -> list[TransactionEffect]:
        replica = self.replicas[member]
        held = replica.held if held is None else held
        usable = self.newest is not None and not self.failed and not replica.evicting
        if self.newest is None or not usable or not replica.waiting or held == self.newest.held:
            return []
        if replica.damaged == self.newest.held:
            return []  # it waits until this version is republished, or a newer one is published
        replica.waiting, replica.offered, replica.since = False, self.newest.digest, now
        self.statistics.offers += 1
        return [OfferVersion(member, self.newest)]

    def _reported(self, event: ReplicaReported, now: float) -> list[TransactionEffect]:
        replica = self.replicas.setdefault(event.member, ReplicaRecord(since=now))
        if replica.evicting:
            return []
        state = event.state
        if state is ReplicaState.SERVING and not self.expects(event.version, event.digest):
            # Complete or not, it was never published: treated as a mixture.
            self.statistics.mismatches += 1
            replica.note(f"serves version {event.version} with digest {event.digest!r}, never published")
            state = ReplicaState.TORN
        if replica.state is not state:
            replica.since = now
        moved = state is ReplicaState.SERVING and Held(event.version, event.digest) != replica.held
        replica.state, replica.version, replica.digest = state, event.version, event.digest
        replica.offered = ""
        effects = self._admission(event.member)
        if event.error:
            return effects + self._load_failed(event, now)
        if moved:
            self.statistics.updates += 1
            self.statistics.skipped_versions += event.skipped_versions
            replica.pause_s = event.pause_s
            replica.failures, replica.overdue, replica.first_error, replica.later_errors = 0, 0, "", []
            replica.damages = 0
            if event.digest != self._substitute:
                self.fleet_failures = self.fleet_restarts = self._restarted = 0
        return effects

    def _admission(self, member: MemberId) -> list[TransactionEffect]:
        """Fences a replica that may not serve, admits one that may and opens admission."""
        replica = self.replicas[member]
        may = replica.state is ReplicaState.SERVING and not replica.evicting
        if may == replica.admitted:
            return []
        replica.admitted = may
        if may:
            opened, self.admission_stopped = [OpenAdmission()] if self.admission_stopped else [], False
            return [AdmitReplica(member, replica.version, replica.digest), *opened]
        return [FenceReplica(member, replica.first_error or f"is {replica.state}")]

    def _load_failed(self, event: ReplicaReported, now: float) -> list[TransactionEffect]:
        member, replica = event.member, self.replicas[event.member]
        replica.note(event.error)
        self.statistics.failures += 1
        if self._source_lost:
            return []  # it keeps what it has, or stays fenced, until the trainer's successor publishes
        if event.damaged is not None and not self._is_own_damage(replica, event.damaged):
            return self._damaged(event, event.damaged, now)
        replica.failures += 1
        fault, times = Fault.LOAD_FAILED, replica.failures
        awake = [r.failures for r in self.replicas.values() if r.requested] or [replica.failures]
        by_all = min(awake)
        if by_all > self.fleet_failures and len(awake) >= self._restarted:
            # All failed since the last success: the cause is probably not in any one of them.
            self.fleet_failures = by_all
            fault, times = Fault.ALL_FAILED, by_all
        return self._act(member, decide(fault, replica.state, self.settings.on_fault, times), now)

    def _is_own_damage(self, replica: ReplicaRecord, damaged: Held) -> bool:
        """Whether the replica itself is at fault: it found damage repeatedly, and another one serves that version."""
        others = (one for one in self.replicas.values() if one is not replica)
        return replica.damages >= OWN_DAMAGE and any(one.held == damaged for one in others)

    def _damaged(self, event: ReplicaReported, damaged: Held, now: float) -> list[TransactionEffect]:
        """The trainer writes the version again. Until then the replica keeps its version, or stays fenced."""
        replica = self.replicas[event.member]
        if self.newest is None or damaged != self.newest.held or replica.damaged == damaged:
            return []  # there is a newer one, or the damage is recorded
        replica.damaged = damaged
        replica.damages += 1
        self.statistics.damaged += 1
        return self._act(event.member, decide(Fault.VERSION_DAMAGED, replica.state, self.settings.on_fault), now)

    def _restart_fleet(self, cause: str, now: float) -> list[TransactionEffect]:
        """Restarts all replicas, from the durable version if there is one; after `max_fleet_restarts` fails the run.

        The durable version stays the newest until the trainer publishes again: its emergency checkpoint writes
        every file again, which repairs a damaged artifact.
        """
        manifest = self.durable or self.newest
        if manifest is None:
            raise LocalProtocolError(f"replicas failed to load although nothing was published: {self!r}")
        sentence = (
            f"no replica can load weights version {self.newest.version if self.newest else manifest.version}: "
            f"each of {len(self.replicas)} failed {self.fleet_failures} times, first with: {cause}"
        )
        if self.fleet_restarts >= self.settings.max_fleet_restarts:
            return self._fail(sentence)
        self.fleet_restarts += 1
        self.statistics.fleet_restarts += 1
        self.fleet_failures = 0
        self._restarted = sum(replica.requested for replica in self.replicas.values())
        substituted = self.newest is not None and manifest.digest != self.newest.digest
        self._substitute = manifest.digest if substituted else ""
        self.newest = manifest
        effects: list[TransactionEffect] = [RestartFleet(manifest, sentence)]
        for member in list(self.replicas):
            effects.extend(self._evict(member, sentence, now, whole_fleet=True))
        return effects

    def _reconciled(self, event: MembershipReconciled, now: float) -> list[TransactionEffect]:
        effects: list[TransactionEffect] = []
        for member in sorted(self.replicas.keys() - event.live):
            if self.replicas.pop(member).admitted:
                effects.append(FenceReplica(member, "is no longer a member"))
        for member in sorted(event.live - self.replicas.keys()):
            self.replicas[member] = ReplicaRecord(since=now)
        return effects

    def _trainer_lost(self, event: TrainerLost) -> list[TransactionEffect]:
        """Published versions are complete, so no replica is affected: fenced ones load the newest version."""
        if self.trainer_lost:
            return []
        self.trainer_lost = self._source_lost = True
        return [RestartTrainer(event.reason, event.member)]

    def _ticked(self, now: float) -> list[TransactionEffect]:
        effects: list[TransactionEffect] = []
        for member, replica in list(self.replicas.items()):
            if replica.evicting:
                if now - replica.since > self.settings.unloaded_timeout_s:
                    replica.since = now
                    effects.append(EvictReplica(member, f"has not ended since its eviction: {replica.first_error}"))
                continue
            if replica.offered and now - replica.since > self.settings.deadline_s:
                replica.overdue += 1
                replica.offered, replica.since = "", now
                replica.note(f"did not report within {self.settings.deadline_s:.0f} s of an offer")
                row = decide(Fault.UPDATE_OVERDUE, replica.state, self.settings.on_fault, replica.overdue)
                effects.extend(self._act(member, row, now))
            elif self.newest and replica.is_idle and now - replica.since > self.settings.unloaded_timeout_s:
                why = f"held no complete version for {self.settings.unloaded_timeout_s:.0f} s"
                replica.note(why)
                effects.extend(self._evict(member, why, now))
        return effects + self._watch_health(now)

    def _warn_behind(self, excused: frozenset[MemberId], now: float) -> list[TransactionEffect]:
        """Warns once, after `behind_s`, about a replica that serves an older version with no update under way."""
        effects: list[TransactionEffect] = []
        for member, replica in self.replicas.items():
            idle = replica.admitted and not replica.offered and member not in excused
            if self.newest is None or not idle or replica.held == self.newest.held:
                replica.behind_since, replica.warned = None, False
            elif replica.behind_since is None:
                replica.behind_since = now
            elif now - replica.behind_since > self.settings.behind_s and not replica.warned:
                replica.warned = True
                what = "requests weights and is offered none" if replica.waiting else "does not request weights"
                lacks = f"serves version {replica.version}, the newest is {self.newest.version}"
                effects.append(WarnAboutReplica(member, f"{lacks}, and no update is under way: it {what}"))
        return effects

    def _watch_health(self, now: float) -> list[TransactionEffect]:
        """Fails the run if too few replicas serve for too long. Time before the first version, and time while all
        replicas sleep, does not count."""
        passed_s = now - self._health_checked_at if self._health_checked_at is not None else 0.0
        self._health_checked_at = now
        if self.newest is None or self.healthy >= self.settings.min_healthy:
            self._unhealthy_s = 0.0
            return []
        if not self.replicas or any(replica.requested for replica in self.replicas.values()):
            self._unhealthy_s += passed_s
        if self._unhealthy_s <= self.settings.unhealthy_timeout_s or self.failed:
            return []
        errors = [f"{member}: {r.first_error}" for member, r in self.replicas.items() if r.first_error]
        return self._fail(
            f"only {self.healthy} of the required {self.settings.min_healthy} replicas served for "
            f"{self.settings.unhealthy_timeout_s:.0f} s" + (f" ({errors[0]})" if errors else "")
        )

    # Actions

    def _act(self, member: MemberId, actions: tuple[Action, ...], now: float) -> list[TransactionEffect]:
        """Turns the table's actions into effects; actions of the replica itself need none."""
        replica = self.replicas[member]
        effects: list[TransactionEffect] = []
        for action in actions:
            match action:
                case Action.EVICT:
                    effects.extend(self._evict(member, replica.first_error, now))
                case Action.FAIL:
                    effects.extend(self._fail(f"replica {member} is {replica.state}: {replica.first_error}"))
                case Action.RETRY | Action.REFIT:
                    effects.extend(self._offer(member, now, NOTHING_HELD))
                case Action.STOP_ADMISSION:
                    self.admission_stopped = True
                    effects.append(StopAdmission(replica.first_error))
                case Action.CHECKPOINT if not self.checkpoint_reason:
                    self.checkpoint_reason = replica.first_error
                    effects.append(CheckpointTrainer(replica.first_error))
                case Action.RESTART_FLEET:
                    effects.extend(self._restart_fleet(replica.first_error, now))
                case _:  # FENCE was done with the report; the replica carries out the others
                    pass
        return effects

    def _evict(
        self, member: MemberId, reason: str, now: float, *, whole_fleet: bool = False
    ) -> list[TransactionEffect]:
        replica = self.replicas[member]
        if replica.evicting:
            return []
        if replica.admitted and not whole_fleet and self.healthy <= self.settings.min_healthy:
            replica.failures = replica.overdue = 0  # it serves and is needed: it gets another attempt
            return self._offer(member, now, NOTHING_HELD)
        replica.evicting, replica.offered, replica.waiting, replica.since = True, "", False, now
        self.statistics.evictions += 1
        return [*self._admission(member), EvictReplica(member, reason)]

    def _fail(self, sentence: str) -> list[TransactionEffect]:
        if self.failed:
            return []
        self.failed = sentence
        return [FailRun(sentence)]

    def check(self) -> None:
        for member, replica in self.replicas.items():
            replica.check(member)
        if self.admission_stopped and self.healthy and not self.failed:
            raise LocalProtocolError(f"admission is stopped although a replica may serve: {self!r}")

    def __repr__(self) -> str:
        states = Counter(str(replica.state) for replica in self.replicas.values())
        newest = "nothing published" if self.newest is None else f"newest version {self.newest.version}"
        offers = sum(bool(replica.offered) for replica in self.replicas.values())
        failed = f", failed: {self.failed}" if self.failed else ""
        return f"WeightTransaction({newest}, replicas {dict(states)}, {offers} offers open{failed})"
