"""Passes over a finite environment are counted; where there are none to count, the user is told."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import validate
from penstock.envs.protocol import prompts_per_pass
from penstock.envs.tasks import Copy
from penstock.envs.tools import WithTools
from penstock.errors import ConfigError
from penstock.roles.environments import environment_of
from penstock.rollout.io.language_workload import LanguageWorkload


def made(env: dict[str, Any], **pipeline: Any) -> Any:
    table = {"name": "p", "steps": 1, "env": env, "model": {"kind": "tiny"}} | pipeline
    config = validate({"pipeline": [table]})
    return environment_of(config, config.pipeline[0])


@pytest.fixture
def dataset(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"row {row}", "answer": "x"}) + "\n" for row in range(10)))
    return {"name": "jsonl", "options": {"path": str(path)}}


def test_the_rows_of_a_dataset_are_a_pass_although_its_stream_never_ends(dataset: dict[str, Any]):
    held_out = {"every_steps": 1, "prompts": 4}
    for evaluation, left in ({}, 10), (held_out, 6):
        with closing(made(dataset, epochs=2, evaluation=evaluation)) as environment:
            assert prompts_per_pass(environment) == prompts_per_pass(WithTools(environment, [])) == left
            assert environment.prompt(left).text.startswith("row"), "of the second pass, in an order of its own"


def test_epochs_of_what_never_ends_are_a_mistake():
    with pytest.raises(ConfigError, match="epochs is 2, but environment 'copy' never ends"):
        made({"name": "copy"}, epochs=2)


class Few(Copy):
    """As a user would write it: the position is an index."""

    count: int | None = 3  # type: ignore[assignment]

    def prompt(self, position: int):
        assert position < 3
        return super().prompt(position)


def test_a_finite_environment_is_begun_anew_when_it_ends():
    class Engine:
        max_positions = None

    class Tokenizer:
        eos_id = 0
        stop_ids = (0,)
        bos_ids = ()

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: Any) -> str:
            return "".join(map(chr, ids))

    hooks = LanguageWorkload(Few(), Engine(), Tokenizer())  # type: ignore[arg-type]
    shown = [hooks._read(position) for position in range(6)]
    assert shown[:3] == shown[3:]


class Nothing(Few):
    count = 0


@pytest.mark.parametrize("epochs", [None, 1])
def test_an_environment_without_prompts_is_a_mistake(monkeypatch: pytest.MonkeyPatch, epochs: int | None):
    monkeypatch.setattr("penstock.roles.environments.made", lambda *_: Nothing())
    with pytest.raises(ConfigError, match="has no prompts: its count is 0"):
        made({"name": "copy"}, epochs=epochs)
