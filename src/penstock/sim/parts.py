"""Simulated engine and learner: a seed determines their durations and outcomes, and no model is computed.

Their weights are real tensors, published as real files, staged, verified and swapped by the real updater.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from penstock.engines.models import GymnasiumPolicy, Policy, build
from penstock.engines.serving import Serving, ServingEngine
from penstock.errors import Aborted
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable
from penstock.runtime.clock import sleep
from penstock.sim.truth import Truth, reward_of
from penstock.train.world import ALONE

CHUNKS = 4
"""Decode boundaries at which a simulated generation checks its engine."""
POLL_EVERY_S = 0.05
NEVER_S = 1e7


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations and outcomes. Durations vary by `spread` around these values."""

    sample_s: float = 1.0
    """One batch of samples, until its longest ends."""
    step_s: float = 0.5
    fetch_weights_s: float = 0.1
    publish_s: float = 0.05
    fetch_s: float = 0.005
    """One batch, with its packing."""
    postprocess_s: float = 0.001
    """The samples of one prompt: their scoring."""
    save_s: float = 0.1
    other_s: float = 0.0005
    """Any other offloaded call: hooks, packing, swaps."""
    commit_s: float = 0.002
    latency_s: float = 0.002
    build_s: float = 1.0
    spread: float = 0.3
    equal_bytes: float = 0.0
    """Share of the steps that change no weight: the new version has the digest of the old."""
    equal_rewards: float = 0.0
    """Share of the prompts whose samples all have the same reward."""
    poison: float = 0.0
    """Share of the prompts that can never be generated."""
    prompts: int | None = None
    """Number of prompts of the environment; None: unlimited."""


class EngineFaults(msgspec.Struct):
    """Active faults of one worker's engine. Set by a storm, read by the engine and the workload."""

    hang: bool = False
    hook_fails: float = 0.0
    slow: float = 1.0
    crash: bool = False
    """Staging raises an unexpected exception."""
    damage: bool = False
    """The staged or written bytes differ from the fetched ones."""
    stuck: bool = False
    """A step of an update never ends."""
    wake_fails: float = 0.0
    tear: bool = False
    """Writing in place fails half-way."""
    wrong_digest: bool = False
    """Samples name other weights than they were generated with."""
    builds: bool = True
    lasting: bool = False
    """A restarted worker keeps these faults."""


class SimEnvironment:
    def __init__(self, prompts: int | None) -> None:
        self.count = prompts


class SimEngine(ServingEngine):
    """Serves real weights; generates no tokens."""

    def __init__(self, policy: Policy, faults: EngineFaults, truth: Truth, name: str, *, shared: bool) -> None:
        """`shared`: the engine must leave its devices before another process uses them."""
        super().__init__(Serving(policy.module), seed=0)
        self.interrupted = False
        self._faults = faults
        self._truth = truth
        self._name = name
        self._shared = shared

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        self._truth.occupies(self._name, devices if self._shared else ())
        await super().occupy(devices, timeout_s)

    async def vacate(self, timeout_s: float) -> None:
        await super().vacate(timeout_s)
        self._truth.vacates(self._name)

    def stage(self, tensors: Mapping[str, Any]) -> None:
        if self._faults.crash:
            raise MemoryError("staging failed in simulation")
        if self._faults.stuck:
            sleep(NEVER_S)
        super().stage(tensors)
        if self._faults.damage:
            next(iter(self.staged_tensors().values())).view(-1)[0] += 0.5

    def load_in_place(self, tensors: Mapping[str, Any], version: int, digest: str, timeout_s: float = 60.0) -> float:
        if self._faults.tear:
            for name, tensor in list(self.served_tensors().items())[:2]:
                tensor.detach().copy_(tensors[name])
            raise OSError("the transfer broke off in simulation")
        paused_s = super().load_in_place(tensors, version, digest, timeout_s)
        if self._faults.damage:
            next(iter(self.served_tensors().values())).detach().view(-1)[0] += 0.5
        return paused_s

    def wake(self, timeout_s: float = 60.0, device: Any = None) -> None:
        if self._faults.wake_fails and self._truth.random.random() < self._faults.wake_fails:
            raise OSError("the engine could not be woken in simulation")
        super().wake(timeout_s, device)

    def interrupt(self) -> None:
        self.interrupted = True

    def resume(self) -> None:
        self.interrupted = False


def small_policy() -> Policy:
    policy = build(GymnasiumPolicy(observation_shape=(1,), action_kind="discrete", action_size=2, hidden_size=1))
    set_mark(policy, 0.0)
    return policy


def content_of(tensors: Mapping[str, Any]) -> bytes:
    """Digest of all served bytes, computed independently of the code under test."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors.values():
        digest.update(tensor.detach().numpy().tobytes())
    return digest.digest()


def set_mark(policy: Policy, mark: float) -> None:
    for tensor in policy.named_tensors().values():
        tensor.detach().view(-1)[0] = mark


class Drawn(msgspec.Struct):
    """Weights that the samples of one lease were generated with."""

    version: Version
    digest: str
    newest: Version = Version(0)


class SimWorkload:
    """The five hooks over a `SimEngine`. Generation spans versions, as a real one does."""

    def __init__(
        self, engine: SimEngine, work: Work, faults: EngineFaults, truth: Truth, random: Random, seed: int
    ) -> None:
        self._engine = engine
        self._work = work
        self._faults = faults
        self._truth = truth
        self._random = random
        self._seed = seed

    def preflight(self) -> None:
        pass

    def prepare(self, lease: PromptLease) -> PromptLease | Unusable:
        if Random(self._seed ^ lease.prompt * 7919).random() < self._work.poison:
            return Unusable("poisoned in simulation")
        self._maybe_fail("prepare")
        return lease

    def collate(self, prepared: Sequence[PromptLease]) -> list[PromptLease]:
        return list(prepared)

    async def generate(self, batch: list[PromptLease]) -> list[Drawn]:
        drawn = [Drawn(Version(1 << 60), "") for _ in batch]
        work = self._work
        whole_s = work.sample_s * self._faults.slow * (1 + work.spread * (2 * self._random.random() - 1))
        self._truth.generated_s += whole_s
        for _ in range(CHUNKS):
            await asyncio.sleep(whole_s / CHUNKS)
            while self._faults.hang or self._engine.serving.state != "serving":
                if self._engine.interrupted:
                    break
                await asyncio.sleep(POLL_EVERY_S)
            if self._engine.interrupted:
                raise Aborted("interrupted")
            with self._engine.serving.step() as (version, digest):
                self._truth.decodes(version, digest, content_of(self._engine.served_tensors()))
            for one in drawn:
                if version < one.version:
                    one.version, one.digest = Version(version), digest
                one.newest = Version(version)
        self._maybe_fail("generate")
        return drawn

    def postprocess(self, prepared: PromptLease, generated: Drawn) -> list[Outcome]:
        self._maybe_fail("postprocess")
        return [
            self._outcome(prepared, member, sample, generated)
            for member, sample in zip(prepared.members, prepared.samples, strict=True)
        ]

    def _outcome(self, lease: PromptLease, member: int, sample: int, drawn: Drawn) -> Outcome:
        if self._random.random() < self._faults.hook_fails:
            return Failed("it failed in simulation")
        if lease.evaluation is not None:
            return Finished({}, reward_of(drawn.newest, lease.prompt, member), drawn.version, drawn.digest, 1)
        equal = Random(self._seed ^ lease.prompt * 104729).random() < self._work.equal_rewards
        reward = Random(f"{self._seed} {lease.prompt} {0 if equal else member}").random()
        tokens = np.array([lease.prompt, sample, member, 0], np.int32)
        arrays = {
            "token_ids": tokens,
            "loss_mask": np.array([0, 0, 0, 1], np.uint8),
            "logprobs": np.full(4, -1.0, np.float32),
        }
        digest = drawn.digest[::-1] if self._faults.wrong_digest else drawn.digest
        return Finished(arrays, reward, drawn.version, digest, len(tokens))

    def _maybe_fail(self, hook: str) -> None:
        if self._faults.hook_fails and self._random.random() < self._faults.hook_fails:
            raise ValueError(f"{hook} failed in simulation")


class SimLearner:
    """Records the trained prompts in its state, which checkpoints save."""

    def __init__(
        self,
        work: Work,
        truth: Truth,
        pipeline: str,
        seed: int,
        progressed: Callable[[str], None],
        name: str,
        devices: Sequence[int],
    ) -> None:
        self._name = name
        self._devices = devices
        self.policy = small_policy()
        self.reference = None
        self.steps = 0
        self.trained: list[tuple[int, int]] = []
        """Step and prompt of every group."""
        self._work = work
        self._truth = truth
        self._pipeline = pipeline
        self._seed = seed
        self._progressed = progressed
        truth.learned(pipeline, self.steps, content_of(self.policy.named_tensors()))

    @property
    def objective(self) -> SimLearner:
        """The learner is its own objective: only `packing` is used."""
        return self

    packing = "padded"
    world = ALONE

    @property
    def scored_by(self) -> tuple[()]:
        return ()

    def score(self, micro_batches: Sequence[Any]) -> list[Any]:
        return []

    def step(self, micro_batches: Sequence[Any], scores: Sequence[Any], drawn_now: Sequence[Any]) -> dict[str, float]:
        found: dict[int, list[int]] = {}
        for batch in micro_batches:
            rows, columns = np.nonzero((batch.position_ids_RT == 0) & (batch.sequences_RT >= 0))
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                prompt, sample, _ = batch.token_ids_RT[row, column : column + 3].tolist()
                found.setdefault(prompt, []).append(sample)
        self._truth.trains(self._pipeline, self.steps, found)
        self.trained += [(self.steps, prompt) for prompt in sorted(found)]
        changes = Random(self._seed ^ self.steps * 15485863).random() >= self._work.equal_bytes
        if changes and found:
            set_mark(self.policy, self._mark() + 1.0)
        self.steps += 1
        self._truth.learned(self._pipeline, self.steps, content_of(self.policy.named_tensors()))
        self._progressed(f"training step {self.steps}")
        return {"loss": 0.0}

    def onload(self, device: Any, parts: Sequence[str]) -> None:
        self._truth.occupies(self._name, self._devices)

    def offload(self) -> None:
        self._truth.vacates(self._name)

    def state(self) -> dict[str, Any]:
        numbers = [self.steps, *(number for pair in self.trained for number in pair)]
        return {"sim": next(iter(self.policy.named_tensors().values())).double().new_tensor(numbers)}

    def load_state(self, state: dict[str, Any]) -> None:
        steps, *numbers = (int(number) for number in state["sim"].tolist())
        self.steps = steps
        self.trained = list(zip(numbers[::2], numbers[1::2], strict=True))
        self._truth.learned(self._pipeline, self.steps, content_of(self.policy.named_tensors()))

    def _mark(self) -> float:
        return float(next(iter(self.policy.named_tensors().values())).view(-1)[0])
