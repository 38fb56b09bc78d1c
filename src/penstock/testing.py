"""For tests of environments, rewards and workloads: the worker's own loop in memory, on an engine that a test controls.

    from penstock.testing import check_samples, play

    def test_capitals_are_rewarded():
        samples = play(Shout(seed=1), lambda context: context[-2].upper(), prompts=4, group_size=2)
        check_samples(samples)
        assert all(sample.reward == 1.0 for sample in samples)

`play` generates samples of a text environment, `play_workload` those of your own workload, which may use a
`SimulatedEngine`. `check_samples` asserts that the trainer can train them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.batch import codec
from penstock.batch.pack import PackSettings, pack
from penstock.engines.requests import Completion, Sampling
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.envs.conformity import check_counted, check_text_environment
from penstock.envs.registry import rubric_of, scoring_of
from penstock.envs.settings import EnvSection
from penstock.errors import PenstockError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.rollout.hooks import Arrays, Workload
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.io.scoring import Scoring
from penstock.rollout.prefetch import Bounds
from penstock.rollout.settings import RolloutSection
from penstock.wire.messages import Delivered, Leased

__all__ = ["Sample", "SimulatedEngine", "check_samples", "play", "play_workload"]

DIGEST = "simulated"
TURN_END = "␄"
"""The special token that the chat template of `play` writes after each message."""


@dataclass(frozen=True)
class Sample:
    """One sample as it was delivered, or why it failed."""

    position: int
    """Of its prompt."""
    member: int
    """Of its group."""
    reward: float = math.nan
    length: int = 0
    """Generated tokens, or environment steps."""
    version: int = 0
    arrays: Arrays = field(default_factory=dict, repr=False)
    """As the trainer reads them."""
    text: str = ""
    """Text environments: the whole conversation."""
    error: str = ""
    """Not empty if it failed. A sample without a reward fails if no other of its group has one."""


class SimulatedEngine:
    """Its output is defined by the test. `answers` maps a context, as text, to a completion; `actions` maps
    observations, one per row, to actions. Every token and action has the log-probability -1."""

    def __init__(
        self,
        answers: Callable[[str], str] = lambda context: "",
        actions: Callable[[np.ndarray], np.ndarray] = lambda observations: np.zeros(len(observations), np.int64),
        *,
        tokenizer: Any = None,
        version: int = 0,
        max_positions: int | None = None,
    ) -> None:
        self.answers, self.actions = answers, actions
        self.tokenizer = tokenizer or _CodePoints()
        self.version, self.digest = version, DIGEST
        self.max_positions = max_positions
        self._interrupted = False

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """The answer and the token that ends it, up to `max_new_tokens`."""
        await asyncio.sleep(0)
        answer = self.tokenizer.encode(self.answers(self.tokenizer.decode(context)))
        ids = [*answer, *sampling.stop_ids[-1:]][: sampling.max_new_tokens]
        stopped = bool(ids) and ids[-1] in sampling.stop_ids
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.array([[0, self.version]] if ids else [], np.int32).reshape(-1, 2),
            ending="interrupted" if self._interrupted else "stop" if stopped else "length",
            version=self.version,
            digest=self.digest,
        )

    def act(self, observations: np.ndarray, *, greedy: bool = False) -> tuple[np.ndarray, np.ndarray, int, str]:
        """Actions, their log-probabilities, and the version and digest they were drawn with."""
        actions = np.asarray(self.actions(observations))
        return actions, np.full(len(actions), -1.0, np.float32), self.version, self.digest

    def forget(self, cache_key: object) -> None:
        """Nothing is kept between turns."""

    def interrupt(self) -> None:
        self._interrupted = True

    def resume(self) -> None:
        self._interrupted = False


def play(
    environment: Any,
    answers: Callable[[str], str],
    *,
    prompts: int = 4,
    group_size: int = 2,
    first: int = 0,
    rewards: Sequence[str] = (),
    max_new_tokens: int = 256,
    max_turns: int = 8,
) -> list[Sample]:
    """The samples of `prompts` prompts, from position `first` on, in order.

    `rewards` names reward functions to use instead of the environment's own, as `env.rewards` does. ConfigError if the
    environment cannot be used at all. An environment with an `alphabet` may show and be told its characters only.
    """
    owner, section = type(environment).__name__, EnvSection(name="played", rewards=list(rewards))
    check_counted(owner, environment)
    scoring, converses = scoring_of(owner, section, environment), hasattr(environment, "reply")
    check_text_environment(owner, environment, scoring, converses=converses)
    alphabet = getattr(environment, "alphabet", None)
    tokenizer: Any = CharacterTokenizer(alphabet) if alphabet else _CodePoints()
    workload = LanguageWorkload(
        environment,
        SimulatedEngine(answers, tokenizer=tokenizer),
        tokenizer,
        RolloutSection(max_new_tokens=max_new_tokens, max_turns=max_turns),
        scoring=Scoring(rubric_of(section, environment), all_inline=True),
    )
    try:
        return play_workload(workload, prompts=prompts, group_size=group_size, first=first, tokenizer=tokenizer)
    finally:
        workload.close()


def play_workload(
    workload: Workload[Any, Any, Any], *, prompts: int = 4, group_size: int = 2, first: int = 0, tokenizer: Any = None
) -> list[Sample]:
    """The samples that a workload makes of `prompts` prompts, from position `first` on, in order. What a hook raises
    costs its prompt, as in a run; PeerLost and RunFailed are raised. `tokenizer` decodes the text of samples."""
    memory = _Memory(range(first, first + prompts), group_size)
    bounds = Bounds(batch_samples=4 * group_size, queue_samples=8 * group_size)
    asyncio.run(Runner(workload, memory, memory, RunnerSettings(bounds=bounds, drain_s=10.0)).run())
    return [memory.sample(number, tokenizer) for number in range(prompts * group_size)]


def check_samples(samples: Sequence[Sample]) -> None:
    """Asserts that each sample was made, and that the trainer takes it: its arrays travel and are packed unchanged."""
    assert samples, "there are no samples"
    for sample in samples:
        which = f"sample {sample.member} of prompt {sample.position}"
        assert not sample.error, f"{which} failed: {sample.error}"
        assert math.isfinite(sample.reward), f"{which} has the reward {sample.reward}"
        assert sample.length > 0, f"{which} has nothing to train"
        try:
            batches = pack([sample.arrays], np.ones(1), PackSettings(layout="padded"))
        except (PenstockError, KeyError, ValueError) as error:
            raise AssertionError(f"{which} cannot be trained: {type(error).__name__}: {error}") from error
        assert batches, f"{which} cannot be trained: its arrays are {', '.join(sample.arrays)}"


class _Memory:
    """A controller with a number of prompts, and a payload store without a limit."""

    def __init__(self, positions: range, group_size: int) -> None:
        self._left = list(positions)
        self._positions = positions
        self._group_size = group_size
        self._stored: list[bytes] = []
        self._delivered: dict[int, Rollout | FailedRollout] = {}

    async def lease(self, samples: int, wait_s: float) -> Leased:
        leases: list[PromptLease] = []
        while self._left and samples >= (len(leases) + 1) * self._group_size:
            position = self._left.pop(0)
            start = (position - self._positions.start) * self._group_size
            ids = tuple(SampleId(start + member) for member in range(self._group_size))
            leases.append(PromptLease(PromptIndex(position), 0, ids, tuple(range(self._group_size)), Version(0)))
        return Leased(tuple(leases), "granted" if leases else "exhausted", "running")

    async def deliver(
        self,
        rollouts: Sequence[Rollout],
        failures: Sequence[FailedRollout],
        returned: Sequence[SampleId],
        scores: Sequence[Any] = (),
    ) -> Delivered:
        self._delivered |= {one.sample: one for one in (*rollouts, *failures)}
        return Delivered()

    def write(self, arrays: Arrays) -> PayloadRef:
        self._stored.append(bytes(codec.encode(arrays)))
        return PayloadRef("memory", 0, len(self._stored) - 1, 0, len(self._stored[-1]), 0)

    def discard(self, payloads: Sequence[PayloadRef]) -> None:
        """Nothing is freed before the test ends."""

    def sample(self, number: int, tokenizer: Any) -> Sample:
        position, member = divmod(number, self._group_size)
        position += self._positions.start
        made = self._delivered.get(number)
        if not isinstance(made, Rollout):
            return Sample(position, member, error=made.error if made is not None else "it was never delivered")
        arrays = codec.decode(self._stored[made.payload.slot])
        text = tokenizer.decode(arrays["token_ids"].tolist()) if tokenizer and "token_ids" in arrays else ""
        return Sample(position, member, made.reward, made.length, made.version, arrays, text)


class _CodePoints:
    """One token per character of Unicode, with a chat template: each message is `role: content` up to `TURN_END`."""

    pad_id, eos_id, vocabulary_size = 0, 2, 0x110000 + 3
    stop_ids: tuple[int, ...] = (2,)
    bos_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.inner = SimpleNamespace(
            chat_template="role: content", apply_chat_template=self._render, decode=lambda ids, **_: self._whole(ids)
        )

    def encode(self, text: str) -> list[int]:
        return [ord(character) + 3 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return self._whole(ids).replace(TURN_END, "")

    def _whole(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 3) for token in ids if token >= 3)

    def _render(self, messages: Sequence[Any], *, add_generation_prompt: bool, **_: Any) -> str:
        text = "".join(f"{message['role']}: {message['content']}{TURN_END}\n" for message in messages)
        return text + ("assistant: " if add_generation_prompt else "")
