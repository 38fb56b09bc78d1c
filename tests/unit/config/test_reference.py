"""The keys of a configuration, explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.load import dump, load
from penstock.config.reference import keys
from penstock.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_every_key_is_explained():
    assert [key.path for key in keys() if not key.meaning] == []


def test_every_key_of_a_resolved_configuration_is_there():
    named = {key.path for key in keys()}
    lines = dump(load(ROOT / "examples" / "quickstart.toml")).splitlines()
    assert "pipeline.NAME.train.max_staleness" in named
    for line in lines:
        name, equals, _ = line.partition(" = ")
        if equals:
            assert any(path.endswith(f".{name}") for path in named), name


def test_a_table_or_a_key_is_found_by_what_people_call_it():
    assert keys("pipeline.rollout") == keys("rollout")
    assert {key.table for key in keys("model")} == {
        f'[pipeline.model]  kind = "{kind}"' for kind in ("tiny", "path", "hub", "mlp")
    }
    assert keys("pipeline.letters.rollout") == keys("rollout")
    [key] = keys("train.max_staleness")
    assert (key.path, key.default) == ("pipeline.NAME.train.max_staleness", "2")
    with pytest.raises(ConfigError, match=r"did you mean 'pipeline.rollout'"):
        keys("rolout")


def test_defaults_that_depend_on_the_model_say_so():
    [rate] = keys("learning_rate")
    assert rate.default == "0.001, tiny: 0.002, path: 1e-06, hub: 1e-06, mlp: 0.002"
