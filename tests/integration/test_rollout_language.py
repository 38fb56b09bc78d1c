"""The language workload end to end on a tiny model: one turn, many turns, tools, interruptions, bad environments."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.load import dump, validate
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.torch.engine import TorchEngine
from penstock.envs.protocol import Message, Prompt
from penstock.envs.rewards import Rubric
from penstock.envs.settings import RewardSection
from penstock.envs.tasks import Copy
from penstock.errors import Aborted, ConfigError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.roles.preparing import PromptsInOtherProcess
from penstock.rollout.hooks import Failed, Finished, Unusable
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload, PreparedPrompt
from penstock.rollout.io.preparation_pool import PreparationPool
from penstock.rollout.io.scoring import Scoring
from penstock.rollout.settings import RolloutSection


class Echo(Copy):
    """Answers every completion with its length, until `turns` completions were made."""

    turns = 3

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        return None if len(completions) >= self.turns else "abc"[: len(completions)] + ">"

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        self.seen = columns["turns"]
        return [float(len(turns)) for turns in columns["turns"]]


class Broken(Echo):
    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        if completions[-1]:
            raise ValueError("the environment lost its mind")
        return None


def workload_for(environment: Any, **options: Any) -> LanguageWorkload:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(alphabet=Copy().alphabet, hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    engine = TorchEngine(policy.module, pad_id=0, version=3, digest="three", seed=options.pop("seed", 0))
    given = {name: options.pop(name) for name in ("kept", "scoring") if name in options}
    settings = RolloutSection(**{"max_new_tokens": 5, **options})
    return LanguageWorkload(environment, engine, policy.tokenizer, settings, **given)


def lease(position: int, samples: int = 3, min_version: int = 0) -> PromptLease:
    ids = tuple(SampleId(position * 10 + member) for member in range(samples))
    return PromptLease(PromptIndex(position), 0, ids, tuple(range(samples)), Version(min_version))


def play(workload: LanguageWorkload, leases: Sequence[PromptLease]) -> list[list[Any]]:
    prepared = [workload.prepare(one) for one in leases]
    assert all(isinstance(one, PreparedPrompt) for one in prepared)
    generated = asyncio.run(workload.generate(workload.collate(prepared)))  # type: ignore[arg-type]
    return [list(workload.postprocess(one, made)) for one, made in zip(prepared, generated, strict=True)]  # type: ignore[arg-type]


class Told:
    count = None
    prompt = Copy().prompt

    def score(self, prompts: Any, completions: Any, ended: Any, token_counts: Any, answer: Any) -> list[float | None]:
        self.ended, self.token_counts = ended, token_counts
        return [0.0] * len(completions)


def test_rewards_are_told_how_completions_ended_and_payloads_carry_it() -> None:
    environment = Told()
    workload = workload_for(environment)
    [outcomes] = play(workload, [lease(0, samples=32)])
    ended = ["stop" if made.arrays["token_ids"][-1] in workload.sampling.stop_ids else "length" for made in outcomes]
    assert set(ended) == {"stop", "length"}
    assert environment.ended == ended
    assert environment.token_counts == [made.length for made in outcomes]
    assert [bool(made.arrays["truncated"][0]) for made in outcomes] == [one == "length" for one in ended]


def test_rewards_receive_the_tokens_of_the_last_completion() -> None:
    class Tokens(Echo):
        def score(self, completions: Any, completion_ids: Any, turns: Any) -> list[float | None]:  # type: ignore[override]
            self.completions, self.ids = completions, completion_ids
            return [0.0] * len(completions)

    environment = Tokens()
    workload = workload_for(environment, max_turns=2)
    [outcomes] = play(workload, [lease(0, samples=8)])
    for made, text, ids in zip(outcomes, environment.completions, environment.ids, strict=True):
        assert made.arrays["token_ids"][-len(ids) :].tolist() == ids
        assert workload.tokenizer.decode(ids) == text
        assert made.arrays["loss_mask"][-len(ids) - 1 :].tolist() == [0, *[1] * len(ids)]


def test_single_turn_samples_have_the_promised_arrays() -> None:
    workload = workload_for(Copy())
    workload.preflight()
    for outcomes in play(workload, [lease(0), lease(1)]):
        for outcome in outcomes:
            assert isinstance(outcome, Finished)
            arrays = outcome.arrays
            assert len(arrays["token_ids"]) == len(arrays["loss_mask"]) == len(arrays["logprobs"])
            assert arrays["loss_mask"][:5].sum() == 0
            assert arrays["loss_mask"][5:].all()
            assert arrays["logprobs"][5:].max() < 0
            assert arrays["versions"].tolist() == [[5, 3]]
            assert outcome.length == arrays["loss_mask"].sum()
            assert (outcome.version, outcome.weights_digest) == (3, "three")


def test_many_turns_keep_tokens_as_generated_and_show_the_rewards_every_turn() -> None:
    environment = Echo()
    workload = workload_for(environment, max_turns=5)
    [outcomes] = play(workload, [lease(4, samples=6)])
    assert [outcome.reward for outcome in outcomes] == [3.0] * 6
    for outcome, turns in zip(outcomes, environment.seen, strict=True):
        ids, mask = outcome.arrays["token_ids"], outcome.arrays["loss_mask"]
        generated = np.split(np.flatnonzero(mask), np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1)
        assert [workload.tokenizer.decode(ids[piece].tolist()) for piece in generated] == turns
        assert workload.tokenizer.decode(ids[mask == 0].tolist()).endswith(">a>ab>")


def test_the_turn_limit_and_the_models_positions_end_an_episode() -> None:
    environment = Echo()
    environment.turns = 99
    assert [outcome.reward for outcome in play(workload_for(environment, max_turns=2), [lease(0)])[0]] == [2.0] * 3
    rewards = [outcome.reward for outcome in play(workload_for(environment, max_turns=99), [lease(0)])[0]]
    assert all(2 < reward < 20 for reward in rewards)


def test_an_environment_that_raises_costs_that_episode_alone() -> None:
    workload = workload_for(Broken(), max_turns=3)
    outcomes = [outcome for group in play(workload, [lease(k, 8) for k in range(8)]) for outcome in group]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert failed
    assert len(failed) < len(outcomes)
    assert all("lost its mind" in outcome.error for outcome in failed)


def test_an_environment_that_raises_can_be_made_to_cost_a_reward() -> None:
    """Generated again and again, what makes it raise is never learned from."""
    scoring = Scoring(Rubric([Broken().score]), RewardSection(reward_on_error=-1.0), all_inline=True)
    workload = workload_for(Broken(), max_turns=3, scoring=scoring)
    outcomes = [outcome for group in play(workload, [lease(k, 8) for k in range(8)]) for outcome in group]
    assert all(isinstance(outcome, Finished) for outcome in outcomes)
    assert {outcome.reward for outcome in outcomes} == {-1.0, 1.0}
    broken = [outcome for outcome in outcomes if outcome.reward < 0]
    assert all(outcome.length > 1 and not outcome.arrays["truncated"][0] for outcome in broken)


def test_an_interrupted_batch_goes_on_from_its_kept_tokens_in_another_worker(tmp_path: Path) -> None:
    environment = Echo()
    steps = iter(range(100))
    first = workload_for(environment, max_turns=3, kept=KeptEpisodes(tmp_path))
    first.engine._progressed = lambda: first.engine.interrupt() if next(steps) == 6 else None  # type: ignore[attr-defined]
    batch = [first.prepare(lease(2))]
    with pytest.raises(Aborted, match="kept tokens"):
        asyncio.run(first.generate(batch))  # type: ignore[arg-type]
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    kept = [KeptEpisodes(tmp_path).take(2, 0, member) for member in range(3)]
    for member, episode in enumerate(kept):
        assert episode is not None
        assert episode.generated_tokens > 0
        KeptEpisodes(tmp_path).keep(2, 0, member, episode)
    second = workload_for(environment, max_turns=3, kept=KeptEpisodes(tmp_path), seed=9)
    [outcomes] = play(second, [lease(2)])
    assert [outcome.reward for outcome in outcomes] == [3.0] * 3
    for outcome, episode in zip(outcomes, kept, strict=True):
        assert episode is not None
        prefix = episode.context()
        assert outcome.arrays["token_ids"][: len(prefix)].tolist() == prefix
    assert list(tmp_path.iterdir()) == [], "each is taken once"


def test_kept_episodes_that_are_too_old_or_damaged_are_not_used(tmp_path: Path) -> None:
    workload = workload_for(Copy())
    [[episode]] = asyncio.run(workload.generate([workload.prepare(lease(0, 1))]))  # type: ignore[list-item]
    assert not isinstance(episode, Failed)
    kept = KeptEpisodes(tmp_path)
    kept.keep(0, 0, 0, episode)
    assert kept.take(0, 0, 0, min_version=4) is None
    kept.keep(0, 0, 0, episode)
    next(tmp_path.iterdir()).write_bytes(b"half")
    assert kept.take(0, 0, 0) is None
    assert kept.take(0, 0, 0) is None


@pytest.mark.parametrize("change", [{"environment": Copy(seed=1)}, {"max_new_tokens": 2}])
def test_a_kept_episode_of_other_settings_is_not_continued(tmp_path: Path, change: dict[str, Any]) -> None:
    """A run resumed with `--set`: the same position is another prompt, or a completion may not be as long."""
    first = workload_for(Copy(seed=0), kept=KeptEpisodes(tmp_path))
    steps = iter(range(100))
    first.engine._progressed = lambda: first.engine.interrupt() if next(steps) == 2 else None  # type: ignore[attr-defined]
    with pytest.raises(Aborted, match="kept tokens"):
        asyncio.run(first.generate([first.prepare(lease(2, samples=8))]))  # type: ignore[list-item]
    assert len([*tmp_path.iterdir()]) == 8
    second = workload_for(**({"environment": Copy(seed=0)} | change), kept=KeptEpisodes(tmp_path))
    prepared = second.prepare(lease(2, samples=8))
    assert isinstance(prepared, PreparedPrompt)
    [outcomes] = play(second, [lease(2, samples=8)])
    limit = second.sampling.max_new_tokens
    for outcome in outcomes:
        assert isinstance(outcome, Finished)
        assert outcome.arrays["token_ids"][outcome.arrays["loss_mask"] == 0].tolist() == prepared.token_ids
        assert outcome.length <= limit or not outcome.arrays["truncated"][0]  # or it had ended before


class Cancelling(Echo):
    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        if completions[-1]:
            raise asyncio.CancelledError("a task of the environment was cancelled")
        return None


def test_an_environment_that_raises_a_cancellation_costs_that_episode_alone() -> None:
    workload = workload_for(Cancelling(), max_turns=3)
    outcomes = [outcome for group in play(workload, [lease(k, 8) for k in range(8)]) for outcome in group]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert 0 < len(failed) < len(outcomes)
    assert all("a task of the environment was cancelled" in outcome.error for outcome in failed)


def test_prompts_that_cannot_work_are_set_aside_or_refused_at_preflight() -> None:
    class Long(Copy):
        def prompt(self, position: int) -> Prompt:
            return Prompt("a" * (44 + position))

    class Chat(Copy):
        def prompt(self, position: int) -> Prompt:
            return Prompt(messages=(Message("user", "hi"),))

    unusable = workload_for(Long()).prepare(lease(3))
    assert isinstance(unusable, Unusable)
    assert "47 tokens; with 5 new ones that exceeds the model's 48 positions" in unusable.reason
    with pytest.raises(ConfigError, match="cannot be used"):
        workload_for(Long()).preflight()
    with pytest.raises(ConfigError, match="no chat template"):
        workload_for(Chat()).preflight()


def test_a_completion_nothing_applies_to_is_poison() -> None:
    class Indifferent(Copy):
        def score(self, prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            return [None] * len(completions)

    [[outcome]] = play(workload_for(Indifferent()), [lease(0, 1)])
    assert isinstance(outcome, Failed)
    assert outcome.poison


@pytest.mark.slow
def test_a_preparation_process_that_dies_is_replaced() -> None:
    pool = PreparationPool(1)
    try:
        pid = pool.run(os.getpid)
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        assert pool.run(os.getpid) != pid
        with pytest.raises(ValueError, match="math domain error"):
            pool.run(math.sqrt, -1)
    finally:
        pool.close()


@pytest.mark.slow
def test_prompts_may_be_read_in_other_processes(tmp_path: Path) -> None:
    pipeline = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    config_path = tmp_path / "config.toml"
    config_path.write_text(dump(validate({"run": {"seed": 5}, "pipeline": [pipeline]})))
    here = Copy(seed=5)
    elsewhere = PromptsInOtherProcess(here, config_path, "a", 1)
    try:
        assert [elsewhere.prompt(position) for position in range(4)] == [here.prompt(position) for position in range(4)]
        assert elsewhere.alphabet == here.alphabet
        assert elsewhere._pool.run(os.getpid) != os.getpid()
    finally:
        elsewhere._pool.close()
