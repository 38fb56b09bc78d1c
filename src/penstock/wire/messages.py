"""Every call to the controller and every reply, as tagged unions.

There is no second vocabulary: the control machine takes these requests as its events, the journal keeps them, and the
first effect of a request is its reply.

Each request may be repeated after a lost reply without harm: a lease by its `request` number, a delivery by the
samples' states, a batch and its acknowledgement by the step. Waiting is bounded by `wait_s` on every call that waits.
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
    """What all requests share: which pipeline, and which incarnation of which process is calling."""

    pipeline: PipelineName
    member: MemberId


class Register(Call, tag="register", frozen=True):
    """First call of every process. Repeating it refreshes the registration."""

    role: Role
    pid: int = 0
    host_id: str = ""
    ring: RingAddress | None = None
    prompt_count: int | None = None
    """Rollout workers: how many distinct prompts the environment has, None when it never runs out."""
    step: StepIndex | None = None
    """Trainers: the step they will train next. Lower than the ledger's: training is rolled back to it."""
    lineage: str = ""
    more_rings: tuple[RingAddress, ...] = ()
    """A worker of several ranks: the rings its other ranks write to."""


class Unregister(Call, tag="unregister", frozen=True):
    """Last call of a process that leaves, or its supervisor's word that it `died`; leases return."""

    reason: str = ""
    died: bool = False
    failed: bool = False
    """It leaves because of an error: what it was to do is not done."""


LOADING = "loading"
"""How `doing` begins for a worker whose engine cannot serve yet."""
REWARD = "reward"
"""And for one with a reward function that runs for long."""


class Heartbeat(Call, tag="heartbeat", frozen=True):
    """Sent by the sidecar. `progressed_ago_s` is read from the parent: a wedged parent cannot look alive."""

    progressed_ago_s: float
    doing: str = ""


class AskLease(Call, tag="ask_lease", frozen=True):
    """Asks for up to `samples` samples to generate."""

    request: int
    """Counted up by the worker with every grant that reached it; what a number was granted it is granted again."""
    samples: int
    version: Version
    """What the engine serves now."""
    wait_s: float = 0.0
    call: int = 0
    """Samples that the worker generates in one call; 0: any number at any time."""
    workers: int = 0
    """Set by the controller: how many workers are awake in the pool, to divide leases among; 0 without a pool."""
    steady: bool = True
    """Set by the controller: the weights of this worker are not being changed right now."""


class Deliver(Call, tag="deliver", frozen=True):
    """Reports finished and failed samples, and gives back leases that were not used."""

    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()
    returned: tuple[SampleId, ...] = ()
    scores: tuple[Score, ...] = ()
    """Finished samples of an evaluation; failed and unused ones are among the others."""


class AskBatch(Call, tag="ask_batch", frozen=True):
    """Asks for the batch of `step`; asking again for the same step gets the same batch."""

    step: StepIndex
    wait_s: float = 0.0


class AckStep(Call, tag="ack_step", frozen=True):
    """The step was trained, on everything it was given except the samples of `missing_prompts`' groups."""

    step: StepIndex
    missing_prompts: tuple[PromptIndex, ...] = ()
    """Prompts whose payloads could not be fetched: not trained, to be issued again."""
    missing_reason: str = ""
    metrics: dict[str, float] = {}


class AckCheckpoint(Call, tag="ack_checkpoint", frozen=True):
    """All steps below `step` are in a durable checkpoint."""

    step: StepIndex
    last_resort: StepIndex | None = None
    """Where the trainer would start from if all newer checkpoints turned out damaged; None: it has no older one."""


class FlushJournal(Call, tag="flush_journal", frozen=True):
    """Answered once everything that was acknowledged so far would survive a loss of power.

    A trainer asks for it before it writes a checkpoint: after a power failure the journal must know every step that is
    in a checkpoint.
    """


class PublishWeights(Call, tag="publish_weights", frozen=True):
    """A complete, immutable version can now be loaded."""

    manifest: Manifest
    durable: bool = False
    """It was written afresh and flushed to the disk, together with a checkpoint."""


class AskCheckpoint(Call, tag="ask_checkpoint", frozen=True):
    """A trainer waits to be asked for a checkpoint out of turn. Asked again until it has published one, durably."""

    wait_s: float = 0.0


class AskWeights(Call, tag="ask_weights", frozen=True):
    """Waits for another version than the one held. Only the newest is ever offered; its bytes may be those held."""

    held: Held = NOTHING_HELD
    wait_s: float = 0.0


class ReportReplica(Call, tag="report_replica", frozen=True):
    """What an engine serves now: recomputed digest, not a promise."""

    state: Literal["serving", "paused", "torn", "loaded", "stale"]
    version: Version
    digest: str
    pause_s: float = 0.0
    skipped_versions: int = 0
    error: str = ""
    damaged: Held | None = None
    """The version whose published bytes are not what its manifest states."""


class ReportMetrics(Call, tag="report_metrics", frozen=True):
    """Gauges of one process (loop lag, queue depths, rates), for the live view and the metrics file."""

    values: dict[str, float]


class AskDevices(Call, tag="ask_devices", frozen=True):
    """Asks for `count` devices among `among`, and gives back the grant `release` in the same breath."""

    request: int
    """Counted up by the caller; asking again with the same number is waiting on."""
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    timeout_s: float
    """The request itself ends when it has not been granted for this long."""
    release: int | None = None
    wait_s: float = 0.0


class CancelDevices(Call, tag="cancel_devices", frozen=True):
    """The request is no longer wanted. Too late if it was granted: then release it."""

    request: int


class ReleaseDevices(Call, tag="release_devices", frozen=True):
    """The devices of this grant are free: memory released, and verified."""

    request: int


class AskOrders(Call, tag="ask_orders", frozen=True):
    """A generation worker asks what it must do now; waits for an order other than `seen`."""

    seen: OrderNumber = OrderNumber(0)
    wait_s: float = 0.0


class ReportOrder(Call, tag="report_order", frozen=True):
    """How an order ended. After a failure `released` says whether the worker verifiably holds no device."""

    order: OrderNumber
    done: bool
    released: bool = False
    error: str = ""


PoolRequest = AskDevices | CancelDevices | ReleaseDevices | AskOrders | ReportOrder
"""Calls that the shared device pool answers, not the pipeline's own control."""


class Stop(Call, tag="stop", frozen=True):
    """Ask the whole run to end. `failed`: it fails, with `reason` as its sentence."""

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
    """Done, nothing to add."""


class Registered(msgspec.Struct, tag="registered", frozen=True):
    phase: Phase
    version: Version
    step: StepIndex
    """Trainers: the next step the ledger expects."""


class HeartbeatSeen(msgspec.Struct, tag="heartbeat_seen", frozen=True):
    """Reply to a heartbeat. A member that is not known (any more) must stop or register again."""

    known: bool
    phase: Phase


class Leased(msgspec.Struct, tag="leased", frozen=True):
    leases: tuple[PromptLease, ...]
    verdict: Verdict
    """`exhausted` is final: the worker stops asking."""
    phase: Phase
    prefetch: bool | None = None
    """Live setting: None leaves the worker's own configuration in force."""
    discard: tuple[PayloadRef, ...] = ()
    """Payloads of the caller's ring without a reader: their samples were dropped. May come twice."""
    oldest: Version | None = None
    """No sample made with a lower version will ever be read: whatever is left of those can be freed."""


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    """What became of each sample; everything not named was accepted."""

    refused: tuple[SampleId, ...] = ()
    reason: str = ""


class BatchReady(msgspec.Struct, tag="batch_ready", frozen=True):
    batch: Batch
    rings: tuple[RingAddress, ...]
    """Where the payloads of this batch can be read."""


class NotYet(msgspec.Struct, tag="not_yet", frozen=True):
    """The wait ended without a result; `waiting_for` says for what, for the log and the diagnosis."""

    waiting_for: str
    phase: Phase


class Complete(msgspec.Struct, tag="complete", frozen=True):
    """Training is complete: no further batch will come."""

    steps: StepIndex


class Weights(msgspec.Struct, tag="weights", frozen=True):
    manifest: Manifest


class CheckpointWanted(msgspec.Struct, tag="checkpoint_wanted", frozen=True):
    """Save the state now and publish the weights afresh: what was published cannot be loaded."""

    reason: str


class DevicesGranted(msgspec.Struct, tag="devices_granted", frozen=True):
    grant: GrantedDevices


class Orders(msgspec.Struct, tag="orders", frozen=True):
    """What the worker must do now; empty: it is where it should be."""

    orders: tuple[Order, ...]


PoolReply = DevicesGranted | Orders


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The call changed nothing. `kind` is the name of the error class the caller should raise."""

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
