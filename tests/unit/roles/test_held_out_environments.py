"""What is evaluated on is never trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import validate
from penstock.config.run import Config
from penstock.envs.io.datasets import Dataset
from penstock.envs.tasks import Copy
from penstock.errors import ConfigError
from penstock.roles.environments import environment_of, evaluation_environment_of


def config(trained: dict[str, Any], model: str = "tiny", **evaluation: Any) -> Config:
    pipeline = {"name": "p", "steps": 1, "env": trained, "model": {"kind": model}}
    return validate({"pipeline": [pipeline | {"evaluation": {"every_steps": 1, "prompts": 4} | evaluation}]})


@pytest.fixture
def both() -> Iterator[Callable[[Config], tuple[Any, Any]]]:
    """Makes the environment to train on and the one to evaluate on."""
    with ExitStack() as made:

        def make(config: Config) -> tuple[Any, Any]:
            pipeline = config.pipeline[0]
            pair = environment_of(config, pipeline), evaluation_environment_of(config, pipeline)
            for environment in pair:
                made.callback(getattr(environment, "close", lambda: None))
            return pair

        yield make


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"row {row}", "answer": "x"}) + "\n" for row in range(10)))
    return str(path)


@pytest.mark.parametrize("epochs", [None, 2])
def test_the_last_rows_of_a_dataset_are_kept_out_of_every_epoch(both, rows: str, epochs: int | None):
    options = {"path": rows} | ({"epochs": epochs} if epochs is not None else {})
    trained, held_out = both(config({"name": "jsonl", "options": options}))
    assert [held_out.prompt(position).text for position in range(4)] == ["row 6", "row 7", "row 8", "row 9"]
    shown = [trained.prompt(position).text for position in range(12)]
    assert sorted(shown) == sorted(2 * [f"row {row}" for row in range(6)])
    assert trained.count == (None if epochs is None else 12)


def test_rows_are_kept_out_only_where_something_is_evaluated_on_them(both, rows: str):
    env = {"name": "jsonl", "options": {"path": rows, "epochs": 1}}
    off = config(env, every_steps=0)
    whole = environment_of(off, off.pipeline[0])
    assert whole.count == 10
    whole.close()
    trained, held_out = both(config(env, env={"name": "copy"}))
    assert trained.count == 10
    assert isinstance(held_out, Copy)


def test_a_dataset_must_have_rows_left_to_train_on(rows: str):
    whole = Dataset(path=rows)
    with pytest.raises(ConfigError, match="has 10 rows; 10 of them cannot be kept for evaluation"):
        whole.hold_out(10)
    whole.close()


def test_prompts_that_are_made_are_made_from_another_seed(both):
    trained, held_out = both(config({"name": "copy", "options": {"letters": 26, "length": 12}}))
    shown = {trained.prompt(position).text for position in range(100)}
    assert not shown & {held_out.prompt(position).text for position in range(100)}
    _, other = both(config({"name": "copy", "options": {"letters": 26, "length": 12, "seed": 7}}))
    assert other.prompt(0).text != held_out.prompt(0).text


def test_a_pole_starts_elsewhere(both):
    trained, held_out = both(config({"name": "gymnasium", "options": {"id": "CartPole-v1"}}, model="mlp"))
    seeds = {trained.episode_seed(position) for position in range(50)}
    assert not seeds & {held_out.episode_seed(position) for position in range(50)}


TOOLS = """
from penstock import WithTools
from penstock.envs.io.datasets import Dataset

def add(a: int, b: int) -> int:
    "The sum."
    return a + b

def tools(path, seed=0):
    return WithTools(Dataset(path=path, seed=seed), [add], introduce=False)
"""


def test_rows_are_held_out_of_a_dataset_with_tools(both, rows: str, tmp_path: Path, monkeypatch):
    (tmp_path / "tools_environments.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    trained, held_out = both(config({"name": "tools_environments:tools", "options": {"path": rows}}))
    assert [held_out.prompt(position).text for position in range(4)] == ["row 6", "row 7", "row 8", "row 9"]
    assert {trained.prompt(position).text for position in range(12)} == {f"row {row}" for row in range(6)}
    assert [*held_out.tools] == ["add"]
    assert not hasattr(held_out, "hold_out")


FINITE = """
from penstock import WithTools
from penstock.envs.tasks import Copy
from penstock.envs.mixture import Mixture

class Finite(Copy):
    count = 5
    def __init__(self, seed=0):
        super().__init__(seed=seed)

class Shuffled(Copy):
    rows = 5
    def __init__(self, seed=0):
        super().__init__(seed=seed)

def tools(seed=0):
    return WithTools(Shuffled(seed), [])

def mixed(seed=0):
    return Mixture({"copy": (Copy(), 1.0)}, seed=seed)

def mixed_tools(seed=0):
    return WithTools(mixed(seed), [])
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Finite", "has only 5 prompts and no method hold_out"),
        ("Shuffled", "has only 5 prompts and no method hold_out"),
        ("tools", "has only 5 prompts and no method hold_out"),
        ("mixed", "a mixture cannot hold prompts out"),
        ("mixed_tools", "a mixture cannot hold prompts out"),
    ],
)
def test_an_environment_that_cannot_hold_out_is_refused(tmp_path: Path, monkeypatch, name: str, sentence: str):
    (tmp_path / "finite_environments.py").write_text(FINITE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = config({"name": f"finite_environments:{name}"})
    with pytest.raises(ConfigError, match=sentence):
        evaluation_environment_of(made, made.pipeline[0])


@pytest.mark.parametrize(
    ("evaluation", "more", "sentence"),
    [
        ({"samples": 2}, {}, "equal at temperature 0"),
        ({}, {"rollout": {"ranks": 2}}, "workers of one rank"),
        ({"env": {"name": "gymnasium", "options": {"id": "CartPole-v1"}}}, {}, "of another kind"),
        ({"temperature": 0.7}, {"env": {"name": "gymnasium"}, "model": {"kind": "mlp"}}, "is 0 or 1, found 0.7"),
    ],
)
def test_what_cannot_be_is_refused_at_once(evaluation: dict[str, Any], more: dict[str, Any], sentence: str):
    pipeline = {"name": "p", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}} | more
    with pytest.raises(ConfigError, match=sentence):
        validate({"pipeline": [pipeline | {"evaluation": {"every_steps": 1} | evaluation}]})


def test_what_is_evaluated_on_has_enough_prompts(both, rows: str):
    """Shown again and again, the same few prompts would pass for many."""
    other = {"name": "jsonl", "options": {"path": rows}}
    with pytest.raises(ConfigError, match=r"evaluation\.prompts is 11, but there are only 10"):
        both(config({"name": "copy"}, env=other, prompts=11))
