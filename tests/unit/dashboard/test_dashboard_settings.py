"""The configuration as rows, and what differs between runs."""

from __future__ import annotations

from penstock.dashboard.settings_table import MOST_CHARACTERS, differences, rows


def test_every_key_has_a_row():
    config = {
        "run": {"name": "a", "extra_path": []},
        "pipeline": [{"name": "p", "train": {"loss": "grpo", "on": True}}],
    }
    assert rows(config) == {
        "run.name": "a",
        "run.extra_path": "[]",
        "pipeline.name": "p",
        "pipeline.train.loss": "grpo",
        "pipeline.train.on": "true",
    }


def test_several_pipelines_go_by_their_names():
    config = {"pipeline": [{"name": "a", "steps": 1}, {"name": "b", "steps": 2}]}
    assert rows(config)["pipeline.b.steps"] == "2"


def test_long_values_are_cut():
    assert len(rows({"prompt": "x" * 10_000})["prompt"]) < MOST_CHARACTERS + 10


def test_runs_differ_in_values():
    runs = {"one": {"steps": "1", "seed": "0"}, "two": {"steps": "2", "seed": "0", "new": "x"}, "three": {"new": "x"}}
    assert differences(runs) == [{"key": "steps", "values": {"one": "1", "two": "2", "three": None}}]
