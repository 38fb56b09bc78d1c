"""The examples a reader copies: short, and they really run, on what `penstock.testing` has for it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock import ConfigError, Message, Prompt
from penstock.testing import SimulatedEngine, check_samples, play, play_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATES = Path(__file__).parents[2] / "src" / "penstock" / "cli" / "templates"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_workload_runs_and_is_rewarded() -> None:
    bandit = loaded(EXAMPLES / "custom_workload.py")
    engine = SimulatedEngine(actions=lambda hints: hints.argmax(axis=1), version=2)
    samples = play_workload(bandit.BanditWorkload(bandit.Bandit(seed=1), engine), prompts=50, group_size=3)
    check_samples(samples)
    assert len(samples) == 150
    assert np.mean([sample.reward for sample in samples]) > 0.8
    assert {sample.version for sample in samples} == {2}
    for sample in samples:
        assert sample.arrays["observations"].shape == (1, 8)
        assert (
            sample.arrays["actions"].shape == sample.arrays["logprobs"].shape == sample.arrays["rewards"].shape == (1,)
        )


def test_the_example_workload_is_short_enough_to_copy() -> None:
    assert len((EXAMPLES / "custom_workload.py").read_text().splitlines()) <= 60


def test_the_tasks_of_the_templates() -> None:
    """What `penstock init` writes."""
    letters = loaded(TEMPLATES / "letters" / "task.py").Letters(seed=1)
    samples = play(letters, lambda context: context[:-1][::-1], prompts=6)
    check_samples(samples)
    assert [sample.reward for sample in samples] == [1.0] * 12

    def adds(context: str) -> str:
        return str(sum(map(int, re.findall(r"\d+", context))))

    samples = play(loaded(TEMPLATES / "chat" / "task.py").Sums(seed=1), adds, prompts=6)
    check_samples(samples)
    assert [sample.reward for sample in samples] == [1.0] * 12


class Guessing:
    """A conversation: the policy guesses a number, and is told where it lies."""

    count = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def prompt(self, position: int) -> Prompt:
        number = (position * 7 + self.seed) % 10
        return Prompt(messages=(Message("user", "Guess my number, 0 to 9."),), columns={"answer": str(number)})

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | None:
        right = prompt.columns["answer"]
        return None if completions[-1] == right else "higher" if completions[-1] < right else "lower"

    def score(self, prompts: Any, completions: Any, *, answer: Any, **columns: Any) -> list[float]:
        return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def test_a_conversation_of_messages() -> None:
    def counting(context: str) -> str:
        return str(context.count("higher"))

    samples = play(Guessing(seed=3), counting, prompts=3, group_size=1, max_turns=10)
    check_samples(samples)
    assert [sample.reward for sample in samples] == [1.0, 1.0, 1.0]
    assert [sample.text.count("higher") for sample in samples] == [3, 0, 7]
    assert samples[0].text.endswith("assistant: 3")
    assert samples[0].length == 8, "four guesses, each with the token that ends it"


class Failing(Guessing):
    def score(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise ValueError("no judge today")


def test_what_goes_wrong_is_found_before_a_run() -> None:
    samples = play(Failing(), lambda context: "5", prompts=1, group_size=2, max_turns=1)
    assert "no judge today" in samples[0].error
    with pytest.raises(AssertionError, match=r"(?s)sample 0 of prompt 0 failed: .*no judge today"):
        check_samples(samples)
    cut = play(Guessing(), lambda context: "12345", prompts=1, max_new_tokens=2, max_turns=1)
    assert [sample.length for sample in cut] == [2, 2]
    with pytest.raises(ConfigError, match="has no `count`"):
        play(object(), lambda context: "")
