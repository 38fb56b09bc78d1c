"""Rewards: combined by weight, checked by name. And the registry that finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.envs.io.datasets import Dataset
from penstock.envs.registry import ENVIRONMENTS, REWARDS, find_environment, find_reward, make_environment
from penstock.envs.rewards import Rubric, contains_answer, exact_answer, position_match
from penstock.envs.tasks import Copy
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
        ([float("nan"), 1.0], "returned nan for completion 0"),
        ([1.0, float("inf")], "returned inf for completion 1"),
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


def test_arrays_and_booleans_are_numbers() -> None:
    def array(prompts: Any, completions: Any, **columns: Any) -> Any:
        return np.array([True, False])

    assert Rubric([array])(["p", "p"], ["a", "b"]) == [1.0, 0.0]


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
