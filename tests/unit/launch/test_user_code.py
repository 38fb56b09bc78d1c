"""Functions and classes passed as objects: what reaches the processes, and what is refused with what to do."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.envs.rewards import exact_answer
from penstock.errors import ConfigError
from penstock.launch.user_code import UserCode

CELL = """
import re, math
from dataclasses import dataclass
from penstock import Prompt
BONUS = {"right": 2.0}
WORD = re.compile("[a-z]+")

@dataclass
class Row:
    text: str

class Found(Exception):
    pass

def helper(text):
    try:
        raise Found
    except Found:
        return BONUS["right"] if WORD.fullmatch(Row(text).text) else math.floor(0.5)

def reward(prompts, completions, **columns):
    return [helper(text) for text in completions]

class Task:
    count = None

    @property
    def alphabet(self):
        return "ab"

    def prompt(self, position):
        return Prompt(text="a")

def recursive(n):
    return 0 if n == 0 else recursive(n - 1)

handle = object()

def uses_handle(prompts, completions, **columns):
    return [handle for _ in completions]

def outer():
    y = 1
    def inner(prompts, completions):
        return [y for _ in completions]
    return inner

nameless = lambda prompts, completions: [0.0]

def graded(prompts, completions, **columns):
    return [0.5 for _ in completions]

loose = graded

def graded(prompts, completions, **columns):
    return [1.0 for _ in completions]

def uses_graded(prompts, completions, **columns):
    return graded(prompts, completions)
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a notebook's cell leaves: source that only `linecache` has, in a `__main__` without a file."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    name = "/tmp/ipykernel_1/1234.py"
    linecache.cache[name] = (len(CELL), None, list[str](CELL.splitlines(keepends=True)), name)
    exec(compile(CELL, name, "exec"), vars(main))
    return vars(main)


def written(code: UserCode, folder: Path) -> ModuleType:
    path = folder / f"{code.module}.py"
    path.write_text(code.text)
    spec = importlib.util.spec_from_file_location(code.module, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[code.module] = importlib.util.module_from_spec(spec)  # where a dataclass looks for it
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[code.module]
    return module


def test_a_cell_goes_by_its_source_with_everything_it_uses(cell: dict[str, Any], tmp_path: Path):
    code = UserCode()
    tree = code.resolve({"env": {"name": cell["Task"], "rewards": [cell["reward"], "exact_answer"]}, "steps": 3})
    assert tree == {
        "env": {"name": f"{code.module}:Task", "rewards": [f"{code.module}:reward", "exact_answer"]},
        "steps": 3,
    }
    module = written(code, tmp_path)
    assert module.reward([], ["abc", "1"]) == [2.0, 0]
    assert module.Task().prompt(0).text == "a"
    assert module.Task().alphabet == "ab"


def test_a_function_may_call_itself(cell: dict[str, Any], tmp_path: Path):
    code = UserCode()
    code.name(cell["recursive"], "reward")
    assert written(code, tmp_path).recursive(3) == 0


def test_what_lives_in_a_module_goes_by_its_import_path():
    code = UserCode()
    assert code.resolve([exact_answer]) == ["penstock.envs.rewards:exact_answer"]
    assert code.text == ""


def test_a_module_beside_the_notebook_is_put_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards_of_this_test.py").write_text("def mine(prompts, completions): return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards_of_this_test as beside  # type: ignore[import-not-found]

    code = UserCode()
    assert code.resolve(beside.mine) == "my_rewards_of_this_test:mine"
    assert code.paths == [tmp_path]


@pytest.mark.parametrize("other", ["graded", "uses_graded"])
def test_two_functions_of_one_name_are_refused(cell: dict[str, Any], other: str):
    with pytest.raises(ConfigError, match="two different objects named 'graded'"):
        UserCode().resolve([cell["loose"], cell[other]])
    assert len(UserCode().resolve([cell["graded"], cell[other]])) == 2


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda cell: cell["nameless"], "is a lambda"),
        (lambda cell: cell["outer"](), "defined inside a function"),
        (lambda cell: cell["Task"]().prompt, "expected a function or a class"),
        (lambda cell: cell["uses_handle"], "uses 'handle', a object of this session"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_what_to_do(cell: dict[str, Any], pick: Any, expected: str):
    with pytest.raises(ConfigError, match=expected) as refused:
        UserCode().name(pick(cell), "reward")
    assert "module" in str(refused.value)
