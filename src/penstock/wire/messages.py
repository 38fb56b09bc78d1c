"""Every call to the controller and every reply, as tagged unions.

The same structs are the events of the control state machine and the entries of the journal. The first effect of a
request is its reply.

Each request is idempotent and may be repeated after a lost reply: a lease is identified by its `request` number, a
delivery by the states of its samples, a batch and its acknowledgement by the step. `wait_s` bounds all waiting.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.records.batch import Batch
from penstock.records.ids import MemberId, PipelineName, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef, RingAddress
from penstock.records.pool import DeviceId, GrantedDevices, Order, OrderNumber, Priority
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout, Score
from penstock.records.weights import NOTHING_HELD, Held, Manifest

Role = Literal["rollout", "trainer"]
Phase = Literal["running", "draining", "complete", "stopped"]
Verdict = Literal["granted", "throttled", "exhausted", "version_too_old"]


class Call(msgspec.Struct, frozen=True):
    """Fields of all requests: the pipeline, and the process incarnation that calls."""

    pipeline: PipelineName
    member: MemberId


class Register(Call, tag="register", frozen=True):
    """First call of every process. Repeating it refreshes the registration."""

    role: Role
    pid: int = 0
    host_id: str = ""
    ring: RingAddress | None = None
    prompt_count: int | None = None
    """Rollout workers: number of distinct prompts of the environment; None: endless."""
    step: StepIndex | None = None
    """Trainers: the step they train next. If it is lower than the ledger's, training is rolled back to it."""
    lineage: str = ""
    more_rings: tuple[RingAddress, ...] = ()
    """A worker of several ranks: the rings of its other ranks."""


class Unregister(Call, tag="unregister", frozen=True):
    """Last call of a process, or its supervisor's report that it `died`. Its leases are issued again."""

    reason: str = ""
    died: bool = False
    failed: bool = False
    """The process leaves because of an error: its work is not complete."""


LOADING = "loading"
"""Prefix of `doing` for a worker whose engine cannot serve yet."""
REWARD = "reward"
"""Prefix of `doing` for a worker whose reward function runs for long."""


class Heartbeat(Call, tag="heartbeat", frozen=True):
    """Sent by the sidecar. `progressed_ago_s` is read from the parent, so a hung parent is detected."""

    progressed_ago_s: float
    doing: str = ""


class AskLease(Call, tag="ask_lease", frozen=True):
    """Requests leases for up to `samples` samples."""

    request: int
    """The worker increments it after every grant that it received. A repeated number returns the same grant."""
    samples: int
    version: Version
    """The version that the engine serves."""
    wait_s: float = 0.0
    call: int = 0
    """Samples that the worker generates in one call; 0: any number at any time."""
    workers: int = 0
    """Set by the controller: number of awake workers in the pool, which share the leases; 0 without a pool."""
    steady: bool = True
    """Set by the controller: the weights of this worker are not being changed."""


class Deliver(Call, tag="deliver", frozen=True):
    """Reports finished and failed samples, and returns unused leases."""

    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()
    returned: tuple[SampleId, ...] = ()
    scores: tuple[Score, ...] = ()
    """Finished samples of an evaluation; its failed and unused samples are in `failures` and `returned`."""


class AskBatch(Call, tag="ask_batch", frozen=True):
    """Requests the batch of `step`. The same step always returns the same batch."""

    step: StepIndex
    wait_s: float = 0.0


class AckStep(Call, tag="ack_step", frozen=True):
    """The step was trained on its batch, except the groups of `missing_prompts`."""

    step: StepIndex
    missing_prompts: tuple[PromptIndex, ...] = ()
    """Prompts whose payloads could not be fetched. They were not trained and are issued again."""
    missing_reason: str = ""
    metrics: dict[str, float] = {}


class AckCheckpoint(Call, tag="ack_checkpoint", frozen=True):
    """All steps below `step` are in a durable checkpoint."""

    step: StepIndex
    last_resort: StepIndex | None = None
    """The step from which the trainer would start if all newer checkpoints were damaged; None: it has no older one."""


class FlushJournal(Call, tag="flush_journal", frozen=True):
    """Returns once everything acknowledged so far would survive a power failure.

    A trainer sends it before it writes a checkpoint: after a power failure the journal must contain every step that
    is in a checkpoint.
    """


class PublishWeights(Call, tag="publish_weights", frozen=True):
    """A complete, immutable version can now be loaded."""

    manifest: Manifest
    durable: bool = False
    """It was written again and flushed to disk, together with a checkpoint."""


class AskCheckpoint(Call, tag="ask_checkpoint", frozen=True):
    """A trainer waits for a request to save an extra checkpoint, repeated until it has published durable weights."""

    wait_s: float = 0.0


class AskWeights(Call, tag="ask_weights", frozen=True):
    """Waits for a version other than `held`. Only the newest is offered; its bytes may equal those held."""

    held: Held = NOTHING_HELD
    wait_s: float = 0.0


class ReportReplica(Call, tag="report_replica", frozen=True):
    """The weights that an engine serves; the digest is recomputed, not assumed."""

    state: Literal["serving", "paused", "torn", "loaded", "stale"]
    version: Version
    digest: str
    pause_s: float = 0.0
    skipped_versions: int = 0
    error: str = ""
    damaged: Held | None = None
    """The version whose published bytes do not match its manifest."""


class ReportMetrics(Call, tag="report_metrics", frozen=True):
    """Gauges of one process (loop lag, queue depths, rates), for the live view and the metrics file."""

    values: dict[str, float]


class AskDevices(Call, tag="ask_devices", frozen=True):
    """Requests `count` devices among `among`, and releases the grant `release` in the same call."""

    request: int
    """Incremented by the caller. A call with the same number continues to wait."""
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    timeout_s: float
    """The request ends if it is not granted within this time."""
    release: int | None = None
    wait_s: float = 0.0


class CancelDevices(Call, tag="cancel_devices", frozen=True):
    """Cancels a request. Without effect once it is granted: then release it."""

    request: int


class ReleaseDevices(Call, tag="release_devices", frozen=True):
    """The devices of this grant are free: their memory is released, and this was verified."""

    request: int


class AskOrders(Call, tag="ask_orders", frozen=True):
    """A generation worker polls its orders; waits for an order other than `seen`."""

    seen: OrderNumber = OrderNumber(0)
    wait_s: float = 0.0


class ReportOrder(Call, tag="report_order", frozen=True):
    """Result of an order. After a failure, `released` is True if the worker verifiably holds no device."""

    order: OrderNumber
    done: bool
    released: bool = False
    error: str = ""


PoolRequest = AskDevices | CancelDevices | ReleaseDevices | AskOrders | ReportOrder
"""Calls that the shared device pool answers, not the pipeline."""


class Stop(Call, tag="stop", frozen=True):
    """Stops the whole run. `failed`: the run fails with the message `reason`."""

    reason: str
    failed: bool = False


Request = (
    Register
    | Unregister
    | Heartbeat
    | AskLease
    | Deliver
    | AskBatch
    | AckStep
    | AckCheckpoint
    | FlushJournal
    | PublishWeights
    | AskCheckpoint
    | AskWeights
    | ReportReplica
    | ReportMetrics
    | PoolRequest
    | Stop
)


class Ok(msgspec.Struct, tag="ok", frozen=True):
    """Success, without data."""


class Registered(msgspec.Struct, tag="registered", frozen=True):
    phase: Phase
    version: Version
    step: StepIndex
    """Trainers: the next step that the ledger expects."""


class HeartbeatSeen(msgspec.Struct, tag="heartbeat_seen", frozen=True):
    """Reply to a heartbeat. A member that is not (or no longer) registered must stop or register again."""

    known: bool
    phase: Phase


class Leased(msgspec.Struct, tag="leased", frozen=True):
    leases: tuple[PromptLease, ...]
    verdict: Verdict
    """`exhausted` is final: the worker requests no more leases."""
    phase: Phase
    prefetch: bool | None = None
    """Live setting; None: the worker uses its own configuration."""
    discard: tuple[PayloadRef, ...] = ()
    """Payloads of the caller's ring without a reader: their samples were dropped. May be repeated."""
    oldest: Version | None = None
    """No sample of a lower version will be read again: its payload can be freed."""


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    """The refused samples; all others were accepted."""

    refused: tuple[SampleId, ...] = ()
    reason: str = ""


class BatchReady(msgspec.Struct, tag="batch_ready", frozen=True):
    batch: Batch
    rings: tuple[RingAddress, ...]
    """The rings that contain the payloads of this batch."""


class NotYet(msgspec.Struct, tag="not_yet", frozen=True):
    """The wait ended without a result; `waiting_for` names what is missing, for the log and the diagnosis."""

    waiting_for: str
    phase: Phase


class Complete(msgspec.Struct, tag="complete", frozen=True):
    """Training is complete: there are no further batches."""

    steps: StepIndex


class Weights(msgspec.Struct, tag="weights", frozen=True):
    manifest: Manifest


class CheckpointWanted(msgspec.Struct, tag="checkpoint_wanted", frozen=True):
    """Save the state now and publish the weights again: the published weights cannot be loaded."""

    reason: str


class DevicesGranted(msgspec.Struct, tag="devices_granted", frozen=True):
    grant: GrantedDevices


class Orders(msgspec.Struct, tag="orders", frozen=True):
    """The pending orders of the worker; empty: there is nothing to do."""

    orders: tuple[Order, ...]


PoolReply = DevicesGranted | Orders


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The call changed nothing. `kind` names the error class that the caller raises."""

    kind: Literal["Stale", "Transient", "PeerLost", "LocalProtocolError", "RunFailed"]
    message: str


Reply = (
    Ok
    | Registered
    | HeartbeatSeen
    | Leased
    | Delivered
    | BatchReady
    | NotYet
    | Complete
    | Weights
    | CheckpointWanted
    | PoolReply
    | Refused
)
