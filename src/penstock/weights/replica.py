"""The state machine of one engine's weights: when it may serve, and when it must not.

The invariant: *a replica serves only one complete version whose digest was recomputed from its own memory.* One that
received any byte in place is TORN until a complete version has been verified in it; before that byte it can safely
continue with the old version. A staged update never leaves SERVING: the new version is complete and verified before the
swap, and the swap is a single step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from penstock.errors import InvalidTransition
from penstock.records.ids import Version
from penstock.records.weights import NOTHING_HELD, Held

RESUME_TRIES = 3
"""Resuming is idempotent and cheap; an engine that fails it this often is broken."""
MAX_INTERRUPTIONS = 3
"""Interrupted transfers in a row before the next one counts as a failure."""


class ReplicaState(StrEnum):
    SERVING = "serving"
    """Generating with one complete, verified version."""
    PAUSED = "paused"
    """Not generating; its version is still complete."""
    TORN = "torn"
    """Holds a mixture of versions, or bytes that differ from those published. Must not generate."""
    LOADED = "loaded"
    """Holds one complete, verified version; not generating yet."""
    STALE = "stale"
    """Started, and has no published version yet. Must not generate."""


class Paused(msgspec.Struct, frozen=True):
    """No forward pass runs, and none will begin."""


class WriteBegan(msgspec.Struct, frozen=True):
    """A byte of another version is about to be written in place."""


class Verified(msgspec.Struct, frozen=True):
    """The digest recomputed from the engine's memory is the one of this version."""

    version: Version
    digest: str


class Swapped(msgspec.Struct, frozen=True):
    """A verified second buffer became the serving one between two decode steps."""

    version: Version
    digest: str


class Relabelled(msgspec.Struct, frozen=True):
    """The served bytes are also those of a newly published version, and are served as that version."""

    version: Version


class Mismatched(msgspec.Struct, frozen=True):
    """The digest recomputed from the engine's memory is not the expected one."""

    expected: str
    found: str


class Resumed(msgspec.Struct, frozen=True):
    """The engine generates again."""


class UpdateFailed(msgspec.Struct, frozen=True):
    """The update in progress ended with an error at the named step. Does not change the state."""

    step: str
    error: str
    transient: bool = False
    """A retry may succeed."""
    damaged: Held | None = None
    """The version whose bytes differ from its manifest: not a fault of this replica."""


ReplicaEvent: TypeAlias = Paused | WriteBegan | Verified | Swapped | Relabelled | Mismatched | Resumed | UpdateFailed


class ResumeEngine(msgspec.Struct, frozen=True):
    """Let the engine generate again, with the version it holds."""


class ReportReplicaState(msgspec.Struct, frozen=True):
    """Report the state and the version to the controller."""

    state: ReplicaState
    version: Version
    digest: str
    error: str = ""
    damaged: Held | None = None


class AbandonReplica(msgspec.Struct, frozen=True):
    """End this process so that a new one replaces it."""

    reason: str


ReplicaEffect: TypeAlias = ResumeEngine | ReportReplicaState | AbandonReplica

_S = ReplicaState

TRANSITIONS: dict[tuple[ReplicaState, type[msgspec.Struct]], ReplicaState] = {
    (_S.SERVING, Paused): _S.PAUSED,
    (_S.SERVING, Swapped): _S.SERVING,
    (_S.SERVING, Relabelled): _S.SERVING,
    (_S.SERVING, Mismatched): _S.TORN,
    (_S.SERVING, Resumed): _S.SERVING,
    (_S.PAUSED, Paused): _S.PAUSED,
    (_S.PAUSED, Resumed): _S.SERVING,
    (_S.PAUSED, WriteBegan): _S.TORN,
    (_S.PAUSED, Mismatched): _S.TORN,
    (_S.TORN, Paused): _S.TORN,
    (_S.TORN, WriteBegan): _S.TORN,
    (_S.TORN, Mismatched): _S.TORN,
    (_S.TORN, Verified): _S.LOADED,
    (_S.LOADED, Paused): _S.LOADED,
    (_S.LOADED, WriteBegan): _S.TORN,
    (_S.LOADED, Mismatched): _S.TORN,
    (_S.LOADED, Verified): _S.LOADED,
    (_S.LOADED, Resumed): _S.SERVING,
    (_S.STALE, Paused): _S.STALE,
    (_S.STALE, WriteBegan): _S.TORN,
    (_S.STALE, Mismatched): _S.TORN,
    (_S.STALE, Verified): _S.LOADED,
}
"""All transitions. `UpdateFailed` is allowed in every state and never changes it."""


MAX_FAILURES = 3
"""Failed updates in a row after which a replica that cannot serve is abandoned."""


class Replica:
    """The machine of one replica. `handle` follows the table; any other event raises `InvalidTransition`."""

    def __init__(self) -> None:
        self.state = ReplicaState.STALE
        self.version = Version(-1)
        self.digest = ""
        self.since = 0.0
        self.failures = 0
        """Updates failed in a row."""
        self.resume_failures = 0
        self.interruptions = 0
        self.damaged: Held | None = None
        """The version that the last update found damaged."""
        self.first_error = ""
        self.later_errors: list[str] = []

    @property
    def may_serve(self) -> bool:
        return self.state is ReplicaState.SERVING

    @property
    def held(self) -> Held:
        """The complete version it holds, if any; published ones are compared with it."""
        complete = (ReplicaState.SERVING, ReplicaState.PAUSED, ReplicaState.LOADED)
        return Held(self.version, self.digest) if self.state in complete else NOTHING_HELD

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        if isinstance(event, UpdateFailed):
            return self._failed(event)
        target = TRANSITIONS.get((self.state, type(event)))
        if target is None:
            raise InvalidTransition(f"{type(event).__name__} cannot happen to a replica that is {self.state}: {self!r}")
        changed = target is not self.state
        self.state = target
        if changed:
            self.since = now
        match event:
            case Verified() | Swapped():
                self.version, self.digest, self.damaged = event.version, event.digest, None
                self.failures, self.interruptions, self.first_error, self.later_errors = 0, 0, "", []
            case Relabelled():
                self.version, self.damaged = event.version, None
                self.failures, self.interruptions, self.first_error, self.later_errors = 0, 0, "", []
            case Mismatched():
                self._note(f"digest {event.found}, expected {event.expected}")
            case Resumed():
                self.resume_failures = 0
        if target in (ReplicaState.TORN, ReplicaState.STALE):
            self.digest = ""
        # These occur within an update, which ends with another event.
        quiet = isinstance(event, Paused | WriteBegan | Verified | Mismatched)
        return [] if quiet else [self._report()]

    def _failed(self, event: UpdateFailed) -> list[ReplicaEffect]:
        if event.transient and event.step == "fetch" and self.interruptions < MAX_INTERRUPTIONS:
            # Most likely its source is being replaced: the new one is published before a report could help.
            self.interruptions += 1
            return []
        self._note(f"{event.step}: {event.error}")
        self.damaged = event.damaged
        if event.step == "resume":
            self.resume_failures += 1
            if self.resume_failures < RESUME_TRIES:
                return [ResumeEngine()]
            return [self._report(), AbandonReplica(f"the engine could not be resumed: {self.first_error}")]
        self.failures += event.damaged is None  # a new process would find the same damage
        if self.state in (ReplicaState.PAUSED, ReplicaState.LOADED):
            return [ResumeEngine()]  # the report follows, with the error, when it serves again
        effects: list[ReplicaEffect] = [self._report()]
        if self.failures >= MAX_FAILURES and self.state in (ReplicaState.TORN, ReplicaState.STALE):
            effects.append(AbandonReplica(f"{self.failures} updates failed in a row: {self.first_error}"))
        return effects

    def _note(self, error: str) -> None:
        """Keeps the first error of consecutive failures, and the last 8 later ones."""
        if not self.first_error:
            self.first_error = error
        else:
            self.later_errors.append(error)
            del self.later_errors[:-8]

    def _report(self) -> ReportReplicaState:
        return ReportReplicaState(self.state, self.version, self.digest, self.first_error, self.damaged)

    def check(self) -> None:
        if self.may_serve and not self.digest:
            raise InvalidTransition(f"a serving replica must have a digest: {self!r}")
        if self.state in (ReplicaState.TORN, ReplicaState.STALE) and self.digest:
            raise InvalidTransition(f"a replica without a complete version must not have a digest: {self!r}")
        if self.resume_failures > RESUME_TRIES:
            raise InvalidTransition(f"a replica was resumed more often than allowed: {self!r}")

    def __repr__(self) -> str:
        error = f", first error {self.first_error!r}" if self.first_error else ""
        return (
            f"Replica({self.state} version {self.version} {self.digest[:8]} since {self.since:.1f}, "
            f"{self.failures} failures{error})"
        )
