"""Rewards: combined by weight, checked by name. And the registry that finds them."""

from __future__ import annotations

import asyncio
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.envs.io.datasets import Dataset
from penstock.envs.mixture import Mixture
from penstock.envs.registry import ENVIRONMENTS, REWARDS, find_environment, find_reward, make_environment
from penstock.envs.rewards import (
    NoReward,
    Rubric,
    arguments_of,
    awaited_values_of,
    contains_answer,
    exact_answer,
    is_async,
    position_match,
    reward_name,
    values_of,
)
from penstock.envs.tasks import Copy
from penstock.envs.tools import WithTools
from penstock.errors import ConfigError, RunFailed


def halves(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return [0.5] * len(completions)


def only_long(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return [1.0 if len(completion) > 2 else None for completion in completions]


def test_rewards_add_up_by_weight_and_none_does_not_count() -> None:
    assert Rubric([halves, only_long], [2.0, 3.0])(["p", "p"], ["abc", "a"]) == [4.0, 1.0]


def test_a_completion_no_function_applies_to_has_no_reward() -> None:
    assert Rubric([only_long])(["p"], ["a"]) == [None]


def ended_well(prompts: Any, completions: Any, ended: Any) -> list[float | None]:
    return [float(how == "stop") for how in ended]


def test_functions_are_told_what_they_have_a_parameter_for() -> None:
    told = {"ended": ["stop", "length"], "token_counts": [1, 2]}
    assert Rubric([ended_well, lambda prompts, completions: [1.0, 1.0]])(["p"] * 2, ["a"] * 2, **told) == [2.0, 1.0]


def test_two_functions_of_one_name_are_told_apart() -> None:
    assert Rubric([halves, halves]).names == ("halves", "halves_2")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "expected 2, found 1"),
        (["1", 2], "returned str '1'"),
        (0.5, "it returned float"),
        ("ab", "it returned str"),
        (None, "it returned NoneType"),
    ],
)
def test_a_broken_reward_function_is_named(returned: Any, message: str) -> None:
    def broken(prompts: Any, completions: Any, **columns: Any) -> Any:
        return returned

    with pytest.raises(RunFailed, match=f"'broken'.*{message}"):
        Rubric([broken])(["p", "p"], ["a", "b"])


@pytest.mark.parametrize(
    "returned",
    [
        np.array([True, False]),
        [np.bool_(True), np.int64(0)],
        [np.float32(1.0), np.float16(0.0)],
        [np.array(1.0), np.array(0)],
        torch.tensor([1.0, 0.0], requires_grad=True),
        [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(0)],
    ],
    ids=repr,
)
def test_arrays_booleans_and_scalars_of_any_kind_are_numbers(returned: Any) -> None:
    def array(prompts: Any, completions: Any, **columns: Any) -> Any:
        return returned

    rewards = Rubric([array])(["p", "p"], ["a", "b"])
    assert rewards == [1.0, 0.0]
    assert [type(reward) for reward in rewards] == [float, float]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), np.float32("inf"), torch.tensor(float("nan"))], ids=repr)
def test_a_reward_that_is_not_finite_costs_its_sample_by_name(bad: Any) -> None:
    def odd(completions: Any) -> Any:
        return [bad if completion == "b" else 1.0 for completion in completions]

    async def odd_too(completions: Any) -> Any:
        return odd(completions)

    prompts = ["what is " + "a long question? " * 20] * 3
    reason = f"'odd' returned {float(bad)} for a completion of the prompt 'what is a long .* must be finite"
    for values in (
        values_of("odd", odd, prompts, ["a", "b", "c"], {}),
        asyncio.run(awaited_values_of("odd", odd_too, prompts, ["a", "b", "c"], {})),
    ):
        assert values[::2] == [1.0, 1.0]
        assert isinstance(values[1], NoReward)
        assert re.search(reason, values[1].reason)
        assert len(values[1].reason) < 250
    rubric = Rubric([odd, halves], [1.0, 2.0])
    [first, second, _] = rubric.combine([values_of("odd", odd, prompts, ["a", "b", "c"], {}), [0.5] * 3])
    assert (first.reward, second.reward) == (2.0, None)
    assert "'odd' returned" in second.error
    with pytest.raises(ValueError, match="'odd' returned"):
        rubric(prompts, ["a", "b", "c"])


class Length:
    def __call__(self, completions: Any, *, weight: float = 1.0) -> Any:
        return [weight * len(completion) for completion in completions]

    def method(self, answer: Any, completions: Any) -> Any:
        return [float(given == right) for given, right in zip(completions, answer, strict=True)]

    async def awaited(self, completions: Any, **kwargs: Any) -> Any:
        assert {*kwargs} == {"prompts", "answer", "token_counts", "completion_ids"}
        return [1.0 for _ in completions]


class AsyncLength:
    async def __call__(self, completions: Any, prompts: Any) -> Any:
        return [float(len(given) - len(shown)) for given, shown in zip(completions, prompts, strict=True)]


def swapped(completions: Any, prompts: Any, **kw: Any) -> Any:
    return [float(len(given) - len(shown)) for given, shown in zip(completions, prompts, strict=True)]


def only_completions(completions: Any, **kwargs: Any) -> Any:
    return [float(len(completion)) for completion in completions]


def counted(completions: Any, token_counts: Any, **kw: Any) -> Any:
    return [float(count) for count in token_counts]


def ids(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> Any:
    return [float(sum(tokens)) for tokens in completion_ids]


def answered(completions: Any, answer: Any, **kwargs: Any) -> Any:
    return [float(given == right) for given, right in zip(completions, answer, strict=True)]


def positional(prompts: Any, completions: Any, /, answer: Any) -> Any:
    return answered(completions, answer)


def with_defaults(completions: Any, trainer_state: Any = None, answer: Any = ()) -> Any:
    assert trainer_state is None
    return answered(completions, answer)


async def judged(completions: Any, answer: Any, **kwargs: Any) -> Any:
    return answered(completions, answer)


@functools.wraps(answered)
def wrapped(*arguments: Any, **keywords: Any) -> Any:
    return answered(*arguments, **keywords)


SIGNATURES: list[tuple[Any, list[float]]] = [
    (swapped, [1.0, 2.0]),
    (only_completions, [2.0, 3.0]),
    (counted, [4.0, 5.0]),
    (ids, [3.0, 7.0]),
    (answered, [1.0, 0.0]),
    (positional, [1.0, 0.0]),
    (with_defaults, [1.0, 0.0]),
    (judged, [1.0, 0.0]),
    (wrapped, [1.0, 0.0]),
    (Length(), [2.0, 3.0]),
    (Length().method, [1.0, 0.0]),
    (Length().awaited, [1.0, 1.0]),
    (AsyncLength(), [1.0, 2.0]),
    (functools.partial(Length(), weight=2.0), [4.0, 6.0]),
    (functools.partial(judged, more=1), [1.0, 0.0]),
    (lambda completions, answer: answered(completions, answer), [1.0, 0.0]),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=[reward_name(one) for one, _ in SIGNATURES])
def test_arguments_are_bound_by_name(function: Any, expected: list[float]) -> None:
    prompts, completions = ["p", "p"], ["aa", "bbb"]
    columns = {"answer": ["aa", "c"], "token_counts": [4, 5], "completion_ids": [[1, 2], [3, 4]]}
    if is_async(function):
        values = asyncio.run(awaited_values_of("f", function, prompts, completions, columns))
    else:
        values = values_of("f", function, prompts, completions, columns)
    assert values == expected


def typo(prompts: Any, completion: Any) -> Any: ...


def unnamed(*arguments: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (typo, "f has a parameter 'completion', which nothing .* by name, to prompts, completions, answer: rename"),
        (unnamed, r"f takes only \*arguments, but is called by name"),
        (functools.partial(typo, completion=1), ""),
        (dict.fromkeys, "f: its parameters cannot be read|which nothing provides"),
    ],
)
def test_a_parameter_that_nothing_provides_is_named(function: Any, message: str) -> None:
    available = dict.fromkeys(["prompts", "completions", "answer"])
    if not message:
        assert arguments_of("f", function, available) == ([], {"prompts": None})
        return
    with pytest.raises(ConfigError, match=message):
        arguments_of("f", function, available)


def test_a_column_that_one_group_lacks_costs_its_samples() -> None:
    [value] = values_of("answered", answered, ["p"], ["a"], {})
    assert isinstance(value, NoReward)
    assert "has a parameter 'answer', which nothing provides" in value.reason


def test_environments_that_hold_others_bind_by_name() -> None:
    class Swapped(Copy):
        def score(self, completions: Any, answer: Any, ended: Any) -> Any:  # type: ignore[override]
            return [float(given == right) for given, right in zip(completions, answer, strict=True)]

    inner: Any = Swapped()
    answer = inner.prompt(0).columns["answer"]
    columns = {"answer": [answer, answer], "ended": ["stop", "stop"], "more": [1, 2]}
    assert WithTools(inner, []).score(["p"] * 2, [answer, "-"], **columns) == [1.0, 0.0]
    mixture = Mixture({"one": (inner, 1.0)})
    assert mixture.score(["p"] * 2, [answer, "-"], environment=["one", "one"], **columns) == [1.0, 0.0]


def test_impossible_rubrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Rubric([])
    with pytest.raises(ConfigError, match=r"one per function \(1\), found 2"):
        Rubric([halves], [1.0, 2.0])


def test_built_in_rewards() -> None:
    columns = {"answer": ["4", "4", None]}
    assert exact_answer([""] * 3, [" 4 ", "44", "4"], **columns) == [1.0, 0.0, None]
    assert contains_answer([""] * 3, ["is 4", "five", "4"], **columns) == [1.0, 0.0, None]
    assert position_match("", "") == 1.0


@pytest.mark.parametrize("name", ["copy", "reverse", "sort", "arithmetic"])
def test_every_built_in_task_can_be_made(name: str) -> None:
    assert make_environment(name, {"seed": 3}).prompt(0)


def test_every_built_in_name_leads_somewhere() -> None:
    assert all(callable(find_environment(name)) for name in ENVIRONMENTS)
    assert all(callable(find_reward(name)) for name in REWARDS)


def test_anything_can_be_named_by_its_import_path() -> None:
    assert find_environment("penstock.envs.tasks:Copy") is Copy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("revers", "unknown environment 'revers'; did you mean 'reverse'"),
        ("zzz", "known: agent, arithmetic, copy"),
        ("no.such.module:Thing", "there is no module 'no'"),
        ("penstock.envs.tasks:Coppy", "has no 'Coppy'; did you mean 'Copy'"),
        ("penstock.envs.tasks:MARK", "is a str, expected a callable"),
    ],
)
def test_unknown_environments_get_the_nearest_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_environment(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("copy", {"lenght": 3}, "no option 'lenght'; did you mean 'length'"),
        ("gymnasium", {}, "missing a required argument: 'id'"),
    ],
)
def test_wrong_options_get_the_nearest_option(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(name, options)


def dataset(tmp_path: Path, text: str, **options: Any) -> Dataset:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return Dataset(path=str(path), **options)


def test_a_file_of_json_lines_is_an_environment(tmp_path: Path) -> None:
    rows = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": [{"role": "user", "content": "hi"}], "answer": "3"}\n'
    environment = dataset(tmp_path, rows, epochs=2, shuffle=False)
    assert environment.count == 4
    assert environment.prompt(2).text == "1+1="
    assert environment.prompt(1).messages[0].content == "hi"
    assert environment.score(["1+1="], ["2"], answer=["2"]) == [1.0]
    environment.close()


def test_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path: Path) -> None:
    environment = dataset(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}', shuffle=False)
    assert [environment.row(number).text for number in range(environment.cursor.rows)] == ["a", "b"]
    environment.close()


def test_a_bad_row_further_down_fails_by_name_when_it_is_met(tmp_path: Path) -> None:
    environment = dataset(tmp_path, '{"prompt": "a"}\n{"prompt": 3}\n')
    with pytest.raises(RunFailed, match="row 2: the column 'prompt'"):
        environment.row(1)
    environment.close()


def test_a_row_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    environment = Dataset(path=str(path))
    with pytest.raises(RunFailed, match="row 2: expected a line with one JSON object in UTF-8"):
        environment.row(1)
    environment.close()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ConfigError, "has no rows"),
        ("nonsense\n", ConfigError, "row 1: expected a line with one JSON object"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}\n',
            ConfigError,
            r"found list .*Expected `str`, got `array` - at `\$\[0\].content`",
        ),
        (
            '{"question": "a"}\n',
            ConfigError,
            "'prompt' must be a text .* found NoneType; the row's columns are question",
        ),
        ('{"prompt": []}\n', ConfigError, "found list"),
    ],
)
def test_bad_files_name_the_row(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dataset(tmp_path, text)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'/no/such/file.jsonl' cannot be read: No such file"):
        Dataset(path="/no/such/file.jsonl")
