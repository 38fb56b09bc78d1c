"""What a user wrote with the wrong parameters is refused before anything starts, in words that say what to write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.check import check_environment
from penstock.config.load import load
from penstock.envs.protocol import Prompt
from penstock.errors import ConfigError
from penstock.roles.environments import environment_of

ROOT = Path(__file__).resolve().parents[3]


class Shout:
    alphabet = "abAB>"
    count: int | None = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def prompt(self, position: int) -> Prompt:
        return Prompt(text="a>", columns={"answer": "A"})

    def score(self, prompts: Sequence[Any], completions: Sequence[str], *, answer: Any, **columns: Any) -> list[float]:
        return [float(given == right) for given, right in zip(completions, answer, strict=True)]


class WithoutSeed(Shout):
    def __init__(self) -> None:
        super().__init__()


class WithoutScore:
    count = None

    def __init__(self, seed: int = 0) -> None: ...

    def prompt(self, position: int) -> Prompt: ...  # type: ignore[empty-body]


class WithoutCount:
    def __init__(self, seed: int = 0) -> None: ...

    def prompt(self, position: int) -> Prompt: ...  # type: ignore[empty-body]

    def score(self, prompts: Any, completions: Any, **columns: Any) -> Any: ...


class OtherColumn(Shout):
    def score(self, prompts: Any, completions: Any, *, answers: Any, **columns: Any) -> Any: ...  # type: ignore[override]


class PlainText(Shout):
    def prompt(self, position: int) -> Any:
        return "a>"


class BadReply(Shout):
    def reply(self, completions: Any) -> Any: ...


class Workload:
    def __init__(self, environment: Any, engine: Any, policy: Any = None) -> None: ...

    def preflight(self) -> None: ...
    def prepare(self, lease: Any) -> Any: ...
    def collate(self, prepared: Any) -> Any: ...
    async def generate(self, batch: Any) -> Any: ...
    def postprocess(self, prepared: Any, generated: Any) -> Any: ...


class WorkloadOfFour:
    def __init__(self, environment: Any, engine: Any, policy: Any = None) -> None: ...

    preflight, prepare, generate, postprocess = (
        Workload.preflight,
        Workload.prepare,
        Workload.generate,
        Workload.postprocess,
    )


class BadPrepare(Workload):
    def prepare(self) -> Any: ...  # type: ignore[override]


def one_argument(rewards: Any) -> Any: ...


def other_column(prompts: Any, completions: Any, *, solution: Any, answer: Any) -> Any: ...


def reward(prompts: Any, completions: Any, answer: Any) -> Any: ...


def loaded(*settings: str) -> Any:
    here = f'run.extra_path=["{Path(__file__).parent}"]'
    return load(ROOT / "examples" / "quickstart.toml", [here, *(f"pipeline.letters.{one}" for one in settings)])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("env.name=test_users_code:WithoutSeed", "must take the run's seed"),
        ("env.name=test_users_code:WithoutScore", "has no method score(prompts, completions)"),
        ("env.name=test_users_code:BadReply", "reply is called with (self, prompt, completions)"),
        ("train.advantage=test_users_code:one_argument", "is called with (rewards, group_sizes), but takes (rewards"),
        ('train.filters=["test_users_code:one_argument"]', "is called with (rewards, lengths), but takes (rewards"),
        ('env.rewards=["test_users_code:one_argument"]', "has a parameter 'rewards', which nothing provides"),
        ("rollout.workload=test_users_code:one_argument", "is called with (environment, engine, policy)"),
        ("rollout.workload=test_users_code:WorkloadOfFour", "has no method collate(prepared)"),
        ("rollout.workload=test_users_code:BadPrepare", "prepare is called with (self, lease), but takes (self)"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_starts(setting: str, expected: str):
    with pytest.raises(ConfigError) as caught:
        check_environment(loaded(setting))
    assert expected in caught.value.message


def test_reward_functions_stand_in_for_score():
    check_environment(loaded("env.name=test_users_code:WithoutScore", 'env.rewards=["test_users_code:reward"]'))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["env.name=test_users_code:WithoutCount"], "has no `count`"),
        (["env.name=test_users_code:PlainText"], "returned a str, expected penstock.Prompt"),
        (["env.name=test_users_code:OtherColumn"], "score has a parameter 'answers', which nothing"),
        (
            ["env.name=test_users_code:Shout", 'env.rewards=["test_users_code:other_column"]'],
            "reward 'test_users_code:other_column' has a parameter 'solution', which nothing provides. Parameters are "
            "bound by name, to prompts, completions, answer, ended, token_counts, completion_ids, conversations:",
        ),
    ],
)
def test_what_shows_only_in_an_object_is_refused_by_the_worker(settings: list[str], expected: str):
    config = loaded(*settings)
    check_environment(config)
    with pytest.raises(ConfigError) as caught:
        environment_of(config, config.pipeline[0])
    assert expected in caught.value.message


@pytest.mark.parametrize(
    "settings",
    [
        ["env.name=test_users_code:Shout"],
        ["env.name=test_users_code:Shout", 'env.rewards=["test_users_code:reward", "exact_answer"]'],
        ["env.name=test_users_code:WithoutScore", "rollout.workload=test_users_code:Workload"],
    ],
)
def test_what_is_right_is_taken(settings: list[str]):
    config = loaded(*settings)
    check_environment(config)
    environment_of(config, config.pipeline[0])


def test_a_gymnasium_environment_of_the_users_own_is_registered_by_its_module(tmp_path: Path):
    module = "import gymnasium\nclass Line(gymnasium.Env): ...\ngymnasium.register('Line-v0', entry_point=Line)\n"
    (tmp_path / "users_line.py").write_text(module)
    gymnasium = ["env.name=gymnasium", "model={kind='mlp'}", "evaluation={}", "rollout={}"]
    overrides = [f"pipeline.letters.{one}" for one in (*gymnasium, 'env.options={id="users_line:Line-v0"}')]
    check_environment(load(ROOT / "examples" / "quickstart.toml", [f'run.extra_path=["{tmp_path}"]', *overrides]))
    with pytest.raises(ConfigError, match="Line-v1"):
        check_environment(loaded(*gymnasium, 'env.options={id="users_line:Line-v1"}'))


@pytest.mark.parametrize("name", ["http.py", "torch.py", "json/__init__.py"])
def test_a_module_with_the_name_of_a_library_is_refused_before_it_is_imported(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('executed')")
    (tmp_path / "mine.py").write_text("x = 1")
    config = load(ROOT / "examples" / "quickstart.toml", [f'run.extra_path=["{tmp_path}"]'])
    with pytest.raises(ConfigError, match=r"has the name of a module that all processes import: rename it"):
        check_environment(config)
    (tmp_path / name).unlink()
    check_environment(config)
