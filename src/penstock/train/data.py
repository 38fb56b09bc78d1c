"""The trainer's data loader: the batch of the next step is fetched and packed while the current step trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.batch.advantage import Advantage, compute
from penstock.batch.codec import decode
from penstock.batch.pack import MicroBatch, PackSettings, pack
from penstock.batch.truncation import masked, overlong
from penstock.control.io.client import ControlClient
from penstock.errors import InvalidTransition, PeerLost, RemoteProtocolError, Transient
from penstock.payload.io.fetch import BatchFetcher, FetchReport
from penstock.payload.io.received import Buffers
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, StepIndex
from penstock.records.payload import RingAddress
from penstock.runtime.clock import monotonic
from penstock.runtime.member import RunMember
from penstock.runtime.offload import Offload
from penstock.train.batch_metrics import SampleFacts, facts_of, figures_of
from penstock.train.rank_calls import Fetched
from penstock.train.ranks import TrainerRanks
from penstock.train.rollout_log import TrainedRollout
from penstock.train.settings import TrainSection
from penstock.wire.messages import AskBatch, BatchReady, Complete, NotYet

log = logging.getLogger(__name__)

LONG_POLL_S = 10.0


@dataclass(slots=True)
class FetchedShare:
    """A rank's share of a batch, as it was fetched."""

    batch: Batch
    groups: list[BatchGroup]
    """Without those of `missing_prompts`."""
    samples: list[dict[str, np.ndarray]]
    facts: tuple[SampleFacts, ...]
    missing_prompts: tuple[PromptIndex, ...]
    missing_reason: str
    report: FetchReport
    took_s: float

    @property
    def prompts(self) -> tuple[PromptIndex, ...]:
        return tuple(group.prompt for group in self.groups)


@dataclass(slots=True)
class PreparedBatch:
    """One step's data, ready to train. Payloads and micro-batches keep their memory until `done`."""

    step: StepIndex
    micro_batches: list[MicroBatch]
    groups: list[BatchGroup]
    samples: list[dict[str, np.ndarray]]
    drawn_now: list[dict[str, np.ndarray]]
    """Those of the samples that were drawn with the very weights that the step changes."""
    advantages: np.ndarray
    missing_prompts: tuple[PromptIndex, ...]
    missing_reason: str
    report: FetchReport
    answered_s: float
    """From the request for it, which is sent when the step before begins, to the controller's answer."""
    prepared_s: float
    final: bool
    memory: list[np.ndarray]
    buffers: Buffers
    figures: dict[str, float]
    """Metrics of the samples of all ranks; only rank 0 has them."""
    unfreed: list[FetchReport]
    """Of earlier steps, whose payloads are not freed yet; the same list in all batches of a loader."""

    def done(self) -> None:
        """The step was trained and acknowledged: the payloads may be overwritten, and so may the micro-batches.

        Payloads in slots that another process has locked are freed with a later step.
        """
        self.unfreed.append(self.report)
        for report in list(self.unfreed):
            try:
                report.consumed()
            except Transient as error:
                log.warning("payloads of a trained step are freed later: %s", error)
            else:
                self.unfreed.remove(report)
        while self.memory:
            self.buffers.release(self.memory.pop())

    def trained(self) -> list[TrainedRollout]:
        """The samples, for the rollout log."""
        columns = [
            (group.prompt, sample, version, reward)
            for group in self.groups
            for sample, version, reward in zip(group.samples, group.versions, group.rewards, strict=True)
        ]
        return [
            TrainedRollout(prompt, sample, version, reward, float(advantage), arrays)
            for (prompt, sample, version, reward), advantage, arrays in zip(
                columns, self.advantages, self.samples, strict=True
            )
        ]


class BatchLoader:
    """Fetches a batch and packs it. Each rank of a trainer has one, for its share."""

    def __init__(
        self,
        fetcher: BatchFetcher,
        offload: Offload,
        advantage: Advantage,
        settings: PackSettings,
        train: TrainSection = TrainSection(),
        *,
        max_new_tokens: int = 0,
    ) -> None:
        """`offload` needs at least two threads: one fetches and waits, the others copy."""
        self._train = train
        self._max_new_tokens = max_new_tokens
        self._fetcher = fetcher
        self._offload = offload
        self._advantage = advantage
        self._settings = settings
        self._buffers = Buffers()
        self._unfreed: list[FetchReport] = []

    async def fetch(self, batch: Batch, rings: tuple[RingAddress, ...]) -> FetchedShare:
        """In a background thread, like the next two."""
        return await self._offload.run(self.fetch_share, batch, rings)

    async def judge(self, groups: Sequence[BatchGroup], facts: Sequence[SampleFacts]) -> np.ndarray:
        return await self._offload.run(self.advantages_of, groups, facts)

    async def pack(self, share: FetchedShare, advantages: np.ndarray) -> PreparedBatch:
        return await self._offload.run(self.pack_share, share, advantages)

    def fetch_share(self, batch: Batch, rings: tuple[RingAddress, ...]) -> FetchedShare:
        began = monotonic()
        report = self._fetcher.fetch((ref for group in batch.groups for ref in group.payloads), rings)
        kept = [group for group in batch.groups if report.missing.keys().isdisjoint(group.payloads)]
        missing = tuple(group.prompt for group in batch.groups if not report.missing.keys().isdisjoint(group.payloads))
        reason = next((f"{why.kind}: {why.detail}" for why in report.missing.values()), "")
        if missing:
            log.warning("step %d: payloads of %d prompts are missing (%s)", batch.step, len(missing), reason)
        samples = [decode(report.views[ref]) for group in kept for ref in group.payloads]
        facts = tuple(facts_of(sample) for sample in samples)
        return FetchedShare(batch, kept, samples, facts, missing, reason, report, monotonic() - began)

    def advantages_of(self, groups: Sequence[BatchGroup], facts: Sequence[SampleFacts]) -> np.ndarray:
        """Of all samples of a whole batch, whichever rank trains them. `facts` are those of its groups, in order."""
        lengths = [length for group in groups for length in group.lengths]
        truncated = np.array([one.truncated for one in facts], bool)
        unscored = np.array([one.unscored for one in facts], bool)
        rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
        rewards -= overlong(
            [one.longest_turn for one in facts],
            truncated,
            limit=self._max_new_tokens,
            tokens=self._train.overlong_tokens,
            penalty=self._train.overlong_penalty,
        )
        sizes = [len(group.samples) for group in groups]
        return advantages_of_scored(self._advantage, rewards, sizes, lengths, truncated, unscored)

    def pack_share(self, share: FetchedShare, advantages: np.ndarray) -> PreparedBatch:
        began = monotonic()
        memory: list[np.ndarray] = []

        def allocate(size_bytes: int) -> np.ndarray:
            memory.append(self._buffers.take(size_bytes))
            return memory[-1]

        mask = self._train.truncated == "mask"
        left_out = np.array([one.unscored or (mask and one.truncated) for one in share.facts], bool)
        samples = masked(share.samples, left_out)
        micro_batches = pack(samples, advantages, self._settings, spread=self._offload.map, allocate=allocate)
        versions = [version for group in share.groups for version in group.versions]
        return PreparedBatch(
            share.batch.step,
            micro_batches,
            share.groups,
            share.samples,
            [one for one, version in zip(share.samples, versions, strict=True) if version == share.batch.step],
            advantages,
            share.missing_prompts,
            share.missing_reason,
            share.report,
            0.0,
            share.took_s + monotonic() - began,
            share.batch.final,
            memory,
            self._buffers,
            {},
            self._unfreed,
        )


class DataLoader:
    """Requests batches from the controller, each for exactly one step.

    Consumes: step numbers. Produces: prepared batches. Waits for: the controller to have a full batch.
    Unblocked by: deliveries, completion, shutdown.
    """

    def __init__(self, process: RunMember, client: ControlClient, loader: BatchLoader, ranks: TrainerRanks) -> None:
        self._process = process
        self._client = client
        self._loader = loader
        self._ranks = ranks
        self.awaited = False
        """Whether the training loop waits for the batch: only then does waiting count as progress."""

    async def prepare(self, step: StepIndex) -> PreparedBatch | None:
        """The batch of a step; every rank prepares its share. None if training is complete or a stop is requested."""
        began = monotonic()
        ready = await self._request(step)
        if ready is None:
            return None
        answered_s = monotonic() - began
        share, answers = self._ranks.fetch(ready.batch, ready.rings)
        own = await self._loader.fetch(share, ready.rings)
        shares: list[FetchedShare | Fetched] = [own]
        for answer in answers:
            other = await answer
            assert isinstance(other, Fetched)
            shares.append(other)
        given = sorted(group.prompt for group in ready.batch.groups)
        fetched = sorted(prompt for one in shares for prompt in (*one.prompts, *one.missing_prompts))
        if fetched != given:
            raise InvalidTransition(f"step {step} has prompts {given}, but its ranks fetched {fetched}")
        whole = WholeBatch(ready.batch.groups, shares)
        mine, *others = whole.split(await self._loader.judge(whole.groups, whole.facts))
        answers = self._ranks.pack(step, others)
        prepared = await self._loader.pack(own, mine)
        for answer in answers:
            await answer
        prepared.answered_s = answered_s
        prepared.figures = figures_of(whole.groups, whole.facts)
        prepared.missing_prompts = tuple(prompt for one in shares for prompt in one.missing_prompts)
        prepared.missing_reason = next((one.missing_reason for one in shares if one.missing_reason), "")
        return prepared

    async def _request(self, step: StepIndex) -> BatchReady | None:
        process = self._process
        while not process.stop.requested:
            try:
                reply = await self._client.call(
                    AskBatch(pipeline=self._client.pipeline, member=process.member, step=step, wait_s=LONG_POLL_S)
                )
            except PeerLost:
                if process.stop.requested:  # the shutdown ended the call
                    return None
                raise
            match reply:
                case BatchReady():
                    return reply
                case Complete():
                    return None
                case NotYet(waiting_for=waiting_for, phase=phase):
                    if self.awaited:
                        process.progress.moved(f"waiting for the batch of step {step}: {waiting_for}")
                    if phase == "stopped":
                        return None
                case _:
                    raise RemoteProtocolError(f"the controller answered a request for a batch with {reply!r}")
        return None


class WholeBatch:
    """The groups of a batch that any rank has fetched, in the order of the batch, however it was shared out."""

    def __init__(self, groups: Sequence[BatchGroup], shares: Sequence[FetchedShare | Fetched]) -> None:
        self._shares = shares
        self._sizes = {group.prompt: len(group.samples) for group in groups}
        facts: dict[PromptIndex, list[SampleFacts]] = {}
        for share in shares:
            remaining = iter(share.facts)
            facts |= {prompt: list(islice(remaining, self._sizes[prompt])) for prompt in share.prompts}
        self.groups = [group for group in groups if group.prompt in facts]
        self.facts = [one for group in self.groups for one in facts[group.prompt]]

    def split(self, advantages: np.ndarray) -> list[np.ndarray]:
        """Those of the samples of each share."""
        remaining = iter(advantages.tolist())
        parts = {group.prompt: list(islice(remaining, len(group.samples))) for group in self.groups}
        return [
            np.array([one for prompt in share.prompts for one in parts[prompt]], np.float32) for share in self._shares
        ]


def advantages_of_scored(
    advantage: Advantage,
    rewards: np.ndarray,
    sizes: list[int],
    lengths: list[int],
    truncated: np.ndarray,
    unscored: np.ndarray,
) -> np.ndarray:
    """One per sample. A sample that could not be scored has 0 and does not count in its group."""
    if not unscored.any():
        return compute(advantage, rewards, sizes, lengths, truncated)
    scored = ~unscored
    counts = np.add.reduceat(scored.astype(np.int64), np.cumsum([0, *sizes[:-1]]))
    left = counts[counts > 0].tolist()
    advantages = np.zeros(len(rewards), np.float32)
    advantages[scored] = compute(
        advantage, rewards[scored], left, np.asarray(lengths)[scored].tolist(), truncated[scored]
    )
    return advantages
