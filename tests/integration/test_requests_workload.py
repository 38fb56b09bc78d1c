"""Language episodes on a request engine: each by itself, many turns, failures of one, interruption without loss."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection
from penstock.envs.protocol import Prompt
from penstock.envs.tasks import Copy
from penstock.errors import Aborted, PeerLost
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Failed, Finished, Outcome
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload, PreparedPrompt
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.rollout.settings import RolloutSection
from penstock.wire.messages import Delivered, Leased

DEADLINE_S = 60.0


class Echo(Copy):
    """Answers every completion, until `turns` completions were made."""

    turns = 3

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        return None if len(completions) >= self.turns else "abc"[: len(completions)] + ">"

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return [float(len(turns)) for turns in columns["turns"]]


def policy_of() -> LanguagePolicy:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(alphabet=Copy().alphabet, hidden_size=16, layers=1, heads=2, max_positions=64))
    assert isinstance(policy, LanguagePolicy)
    return policy


def workload_for(environment: Any, **options: Any) -> LanguageWorkload:
    policy = policy_of()
    progressed = options.pop("progressed", lambda: None)
    engine = TorchEngine(
        policy.module, TorchEngineSection(rows=16), pad_id=0, version=3, digest="three", progressed=progressed
    )
    kept = options.pop("kept", None)
    settings = RolloutSection(**{"max_new_tokens": 5, **options})
    return LanguageWorkload(environment, engine, policy.tokenizer, settings, kept=kept)


def lease(position: int, samples: int = 3) -> PromptLease:
    ids = tuple(SampleId(position * 10 + member) for member in range(samples))
    return PromptLease(PromptIndex(position), 0, ids, tuple(range(samples)), Version(0))


def prepared(workload: LanguageWorkload, leases: Sequence[PromptLease]) -> list[PreparedPrompt]:
    made = [workload.prepare(one) for one in leases]
    assert all(isinstance(one, PreparedPrompt) for one in made)
    return made  # type: ignore[return-value]


async def play(workload: LanguageWorkload, leases: Sequence[PromptLease]) -> list[list[Outcome]]:
    workload.preflight()
    batch = prepared(workload, leases)
    async with asyncio.timeout(DEADLINE_S):
        generated = await workload.generate(workload.collate(batch))
    return [list(workload.postprocess(one, made)) for one, made in zip(batch, generated, strict=True)]  # type: ignore[arg-type]


async def test_each_turn_reads_only_what_is_new_and_nothing_is_kept_afterwards() -> None:
    workload = workload_for(Echo(), max_turns=3)
    [outcomes] = await play(workload, [lease(0, samples=4)])
    read = workload.engine.statistics()["read_tokens"]  # type: ignore[attr-defined]
    prompts = 4 * 5  # or less: those who come together read it together
    replies = len("a>") + len("ab>")
    assert read <= prompts + 4 * (replies + 2), "then each reply, with the last token drawn before it"
    assert len(outcomes) == 4
    async with asyncio.timeout(DEADLINE_S):
        while workload.engine.statistics()["conversations_kept"]:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_an_episode_does_not_wait_for_the_environment_of_another() -> None:
    class Slow(Echo):
        """The first to be asked thinks until all the others are through."""

        def __init__(self) -> None:
            super().__init__()
            self.asked = 0
            self.others_done = threading.Event()
            self.lock = threading.Lock()
            self.ended = 0

        def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
            with self.lock:
                self.asked += 1
                first = self.asked == 1
                self.ended += len(completions) >= 2
                if self.ended == 5:
                    self.others_done.set()
            if first:
                assert self.others_done.wait(DEADLINE_S), "the others waited for this one"
            return None if len(completions) >= 2 else "a"

    environment = Slow()
    [outcomes] = await play(workload_for(environment, max_turns=3), [lease(0, samples=6)])
    assert environment.others_done.is_set()
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Finished)] == [2.0] * 6


async def test_an_episode_that_raises_costs_itself_alone() -> None:
    class Broken(Echo):
        def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
            if len(completions[-1]) % 2:
                raise ValueError("the environment lost its mind")
            return None

    class Choosy(TorchEngine):
        asked = 0

        async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: Any = None) -> Completion:
            self.asked += 1
            if self.asked == 4:
                raise ValueError("the engine does not like this one")
            return await super().complete(context, sampling, cache_key=cache_key)

    workload = workload_for(Broken(), max_turns=3)
    workload.engine = Choosy(policy_of().module, pad_id=0)
    outcomes = [outcome for group in await play(workload, [lease(k, 8) for k in range(4)]) for outcome in group]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert sum("does not like this one" in outcome.error for outcome in failed) == 1
    assert all("lost its mind" in outcome.error or "does not like" in outcome.error for outcome in failed)
    assert 1 < len(failed) < len(outcomes)


async def test_a_lost_engine_fails_no_sample() -> None:
    workload = workload_for(Echo(), max_turns=3)
    engine = workload.engine
    assert isinstance(engine, TorchEngine)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    engine.model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(PeerLost, match="out of memory"):
        await play(workload, [lease(0)])


async def test_an_interrupted_call_goes_on_from_its_kept_tokens_in_another_worker(tmp_path: Path) -> None:
    steps = iter(range(10_000))
    first = workload_for(
        Echo(),
        max_turns=3,
        kept=KeptEpisodes(tmp_path),
        progressed=lambda: first.engine.interrupt() if next(steps) == 7 else None,
    )
    with pytest.raises(Aborted, match="kept tokens"):
        await play(first, [lease(2)])
    kept = [KeptEpisodes(tmp_path).take(2, 0, member) for member in range(3)]
    for member, episode in enumerate(kept):
        assert episode is not None
        assert episode.generated_tokens > 0
        KeptEpisodes(tmp_path).keep(2, 0, member, episode)
    second = workload_for(Echo(), max_turns=3, kept=KeptEpisodes(tmp_path))
    [outcomes] = await play(second, [lease(2)])
    for outcome, episode in zip(outcomes, kept, strict=True):
        assert isinstance(outcome, Finished)
        assert episode is not None
        assert outcome.reward == 3.0
        prefix = episode.context()
        assert np.asarray(outcome.arrays["token_ids"])[: len(prefix)].tolist() == prefix
    assert os.listdir(tmp_path) == [], "each is taken once"


async def test_what_was_kept_finished_is_not_generated_again(tmp_path: Path) -> None:
    workload = workload_for(Copy(), kept=KeptEpisodes(tmp_path))
    [[episode]] = await workload.generate(prepared(workload, [lease(0, 1)]))
    assert not isinstance(episode, Failed)
    KeptEpisodes(tmp_path).keep(0, 0, 0, episode)
    again = workload_for(Copy(), kept=KeptEpisodes(tmp_path))
    again.engine.interrupt()  # it could not generate
    async with asyncio.timeout(DEADLINE_S):
        [[taken]] = await again.generate(prepared(again, [lease(0, 1)]))
    assert not isinstance(taken, Failed)
    assert taken.context() == episode.context()


class ControllerApi:
    """Grants endless leases of four samples and remembers what came back."""

    def __init__(self) -> None:
        self.issued = 0
        self.delivered: list[SampleId] = []
        self.returned: list[SampleId] = []

    async def lease(self, samples: int, wait_s: float) -> Leased:
        leases = []
        for _ in range(max(1, samples // 4)):
            ids = tuple(SampleId(4 * self.issued + member) for member in range(4))
            leases.append(PromptLease(PromptIndex(self.issued), 0, ids, tuple(range(4)), Version(0)))
            self.issued += 1
        return Leased(tuple(leases), "granted", "running", None)

    async def deliver(
        self, rollouts: Sequence[Any], failures: Sequence[Any], returned: Sequence[SampleId], scores: Sequence[Any] = ()
    ) -> Any:
        assert not failures
        self.delivered += [rollout.sample for rollout in rollouts]
        self.returned += returned
        return Delivered()


class Store:
    def write(self, arrays: Any) -> PayloadRef:
        return PayloadRef("ring", 0, 0, 0, 0, 0)

    def discard(self, payloads: Any) -> None:
        pass


async def test_an_abandoned_runner_keeps_what_its_requests_had(tmp_path: Path) -> None:
    workload = workload_for(Echo(), max_turns=3, max_new_tokens=10, kept=KeptEpisodes(tmp_path))
    controller = ControllerApi()
    settings = RunnerSettings(
        drain_s=10.0, bounds=Bounds(batch_samples=4, queue_samples=8, concurrency=8), return_s=30.0
    )
    runner = Runner(workload, controller, Store(), settings, interrupt=workload.engine.interrupt)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        while len(controller.delivered) < 40 or runner.machine.generating < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        runner.abandon("enough")
        assert await running == "enough"
    returned = sorted(controller.returned)
    assert sorted([*controller.delivered, *returned]) == list(range(4 * controller.issued)), (
        "every sample came back, once"
    )
    kept = set(os.listdir(tmp_path))
    assert kept
    assert kept <= {f"{sample // 4}-0-{sample % 4}.episode" for sample in returned}
