"""The table of actions for each fault of a weight update.

A row gives the actions for a replica in a given state, the number of tries, and the actions after that. `CHOOSE` marks
a choice that safety leaves open; the policy decides it. The replica itself carries out KEEP_SERVING, RESUME_OLD and
COMMIT, also without contact to the controller.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from penstock.weights.replica import ReplicaState

Policy = Literal["restore", "evict", "fail"]


class Fault(StrEnum):
    LOAD_FAILED = "load failed"
    """One replica could not fetch, stage or write a version, or verify it."""
    UPDATE_OVERDUE = "update overdue"
    """One replica was offered a version and did not report by the deadline."""
    VERSION_DAMAGED = "version damaged"
    """One replica found that the published bytes differ from the manifest; a new process would find the same."""
    ALL_FAILED = "all replicas failed"


class Action(StrEnum):
    KEEP_SERVING = "keep serving the old version, to the staleness bound"
    RESUME_OLD = "resume at the old version"
    COMMIT = "resume at the verified new version"
    FENCE = "fence: no lease, no sample accepted"
    REFIT = "load one complete version, durable if need be"
    RETRY = "offer the newest version again"
    EVICT = "replace the process; it returns as stale"
    STOP_ADMISSION = "stop admission"
    CHECKPOINT = "emergency checkpoint of the trainer"
    RESTART_FLEET = "restart all replicas from the durable version; after `max_fleet_restarts` fail the run"
    FAIL = "fail the run with one sentence"
    CHOOSE = "by policy"


CHOICES: dict[Policy, Action] = {"restore": Action.REFIT, "evict": Action.EVICT, "fail": Action.FAIL}


class Row(msgspec.Struct, frozen=True):
    """One row: `first` for the first `tries` occurrences in a row, `then` for every later one."""

    fault: Fault
    state: ReplicaState
    first: tuple[Action, ...]
    tries: int = 1_000_000
    then: tuple[Action, ...] = ()


_A, _F, _S = Action, Fault, ReplicaState

_SYSTEMIC = (_A.STOP_ADMISSION, _A.CHECKPOINT, _A.RESTART_FLEET)

TABLE: tuple[Row, ...] = (
    Row(_F.LOAD_FAILED, _S.SERVING, (_A.KEEP_SERVING, _A.RETRY), 2, (_A.EVICT,)),
    Row(_F.LOAD_FAILED, _S.PAUSED, (_A.RESUME_OLD, _A.RETRY), 2, (_A.EVICT,)),
    Row(_F.LOAD_FAILED, _S.TORN, (_A.FENCE, _A.CHOOSE), 2, (_A.FENCE, _A.EVICT)),
    Row(_F.LOAD_FAILED, _S.STALE, (_A.FENCE, _A.RETRY), 2, (_A.FENCE, _A.EVICT)),
    Row(_F.LOAD_FAILED, _S.LOADED, (_A.COMMIT,)),
    Row(_F.VERSION_DAMAGED, _S.SERVING, (_A.KEEP_SERVING, _A.CHECKPOINT)),
    Row(_F.VERSION_DAMAGED, _S.PAUSED, (_A.RESUME_OLD, _A.CHECKPOINT)),
    Row(_F.VERSION_DAMAGED, _S.LOADED, (_A.COMMIT, _A.CHECKPOINT)),
    Row(_F.VERSION_DAMAGED, _S.TORN, (_A.FENCE, _A.CHECKPOINT)),
    Row(_F.VERSION_DAMAGED, _S.STALE, (_A.FENCE, _A.CHECKPOINT)),
    Row(_F.UPDATE_OVERDUE, _S.SERVING, (_A.KEEP_SERVING, _A.RETRY), 1, (_A.EVICT,)),
    Row(_F.UPDATE_OVERDUE, _S.PAUSED, (_A.FENCE, _A.EVICT)),
    Row(_F.UPDATE_OVERDUE, _S.LOADED, (_A.FENCE, _A.EVICT)),
    Row(_F.UPDATE_OVERDUE, _S.TORN, (_A.FENCE, _A.EVICT)),
    Row(_F.UPDATE_OVERDUE, _S.STALE, (_A.FENCE, _A.RETRY), 1, (_A.FENCE, _A.EVICT)),
    Row(_F.ALL_FAILED, _S.SERVING, (_A.KEEP_SERVING, _A.RETRY), 1, _SYSTEMIC),
    Row(_F.ALL_FAILED, _S.PAUSED, (_A.RESUME_OLD, _A.RETRY), 1, _SYSTEMIC),
    Row(_F.ALL_FAILED, _S.LOADED, (_A.COMMIT, _A.RETRY), 1, _SYSTEMIC),
    Row(_F.ALL_FAILED, _S.TORN, (_A.FENCE, _A.CHOOSE), 1, (_A.FENCE, *_SYSTEMIC)),
    Row(_F.ALL_FAILED, _S.STALE, (_A.FENCE, _A.RETRY), 1, (_A.FENCE, *_SYSTEMIC)),
)

_ROWS = {(row.fault, row.state): row for row in TABLE}


def decide(fault: Fault, state: ReplicaState, policy: Policy, times: int = 1) -> tuple[Action, ...]:
    """The actions when the fault occurs for the `times`-th time in a row at a replica in this state."""
    row = _ROWS[fault, state]
    actions = row.first if times <= row.tries else row.then
    return tuple(CHOICES[policy] if action is Action.CHOOSE else action for action in actions)
