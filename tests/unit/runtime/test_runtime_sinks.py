"""Metrics on their way elsewhere: lines are followed, figures taken from them, and each is sent once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime import sinks
from penstock.runtime.following import MAX_BYTES, Following
from penstock.runtime.rundir import RunDir


def test_only_complete_lines_are_handed_out_and_each_once(tmp_path: Path):
    path = tmp_path / "lines"
    following = Following(path)
    assert following.read() == [], "the file is not there yet"
    path.write_bytes(b"one\ntwo\nthr")
    assert following.read() == [b"one", b"two"]
    assert following.read() == []
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert Following(path, following.offset).read() == [b"three"], "another process goes on from the offset"


def test_a_line_longer_than_one_read_comes_whole(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"x" * (MAX_BYTES + 5) + b"\nshort\n")
    following = Following(path)
    assert [len(line) for line in following.read()] == [MAX_BYTES + 5]
    assert following.read() == [b"short"]


def test_an_endless_torn_line_waits_for_its_end(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"x" * (MAX_BYTES + 5))
    following = Following(path)
    assert following.read() == []
    assert following.offset == 0


def test_figures_are_the_numbers_of_a_step():
    line = json.dumps(
        {
            "kind": "step",
            "at": 12.5,
            "pipeline": "letters",
            "step": 3,
            "reward": 0.25,
            "samples": 16,
            "late": False,
            "note": "text",
            "loss": None,
        }
    )
    assert sinks.figures_of(line.encode()) == ("letters", 3, 12.5, {"letters/reward": 0.25, "letters/samples": 16.0})


def test_figures_of_an_evaluation_belong_to_its_version():
    entry = {"kind": "evaluation", "at": 12.5, "pipeline": "letters", "due": 2, "version": 3, "took_s": 0.5}
    line = json.dumps(entry | {"eval/reward": 0.25, "eval/count": 64})
    figures = {"letters/eval/reward": 0.25, "letters/eval/count": 64.0}
    assert sinks.figures_of(line.encode()) == ("letters", 3, 12.5, figures)
    assert sinks.figures_of(json.dumps(entry | {"skipped": "superseded"}).encode()) is None


@pytest.mark.parametrize("line", [b'{"kind": "st', b"[1, 2]", b'{"kind": "process", "at": 1.0}', b""])
def test_lines_without_a_step_have_no_figures(line: bytes):
    assert sinks.figures_of(line) is None


def test_a_sink_that_is_unknown_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="there is no metrics sink 'carrier_pigeon'; there are tensorboard, wandb"):
        sinks.check_sink("carrier_pigeon")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-rl\[wandb\]'"):
        sinks.check_sink("wandb")


def test_each_line_is_sent_once_across_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    received: list[sinks.Figures] = []

    class Collecting:
        def __init__(self, run: RunDir, project: str, config: object) -> None: ...

        def write(self, figures: sinks.Figures) -> None:
            received.append(figures)

        def close(self) -> None: ...

    monkeypatch.setitem(sinks.SINKS, "json", Collecting)
    run = RunDir.create(tmp_path, "run", config_toml="", version="0")

    def train(*steps: int) -> None:
        with run.metrics_path.open("a") as file:
            file.writelines(f'{{"pipeline": "p", "step": {step}, "at": 0, "reward": 1}}\n' for step in steps)

    for steps in [(0, 1, 2), (), (3,)]:
        train(*steps)
        publication = sinks.Publication(run, "json", "penstock", {})
        while publication.send():
            pass
        publication.close()
        assert publication.sent == len(steps)
    assert [figures.step for figures in received] == [0, 1, 2, 3]
