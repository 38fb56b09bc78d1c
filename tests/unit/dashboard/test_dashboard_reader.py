"""Run directories as they are found: growing, torn, older, damaged, empty. Nothing is read twice."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from penstock.dashboard.io.answers import ANSWERS, answer
from penstock.dashboard.io.export import export
from penstock.dashboard.io.run_reader import RunReader
from penstock.dashboard.io.shelf import Shelf
from penstock.errors import ConfigError
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName
from penstock.runtime.following import Following
from penstock.runtime.rundir import RunDir

CONFIG = """
[[pipeline]]
name = "p"
steps = 10
[pipeline.train]
max_staleness = 2
[pipeline.rollout]
workers = 2
"""
HOSTILE = "</script><script>alert('x')</script>"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r", CONFIG, "0.1.0")


def write_steps(run: RunDir, *numbers: int) -> None:
    with run.metrics_path.open("ab") as file:
        for number in numbers:
            line = {"kind": "step", "at": 1e9 + number, "pipeline": "p", "step": number, "reward": number / 10}
            file.write(orjson.dumps(line) + b"\n")


def write_events(run: RunDir, *events: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    journal = Journal(run.journal_path, run.run_id)
    for pipeline, event, notes in events:
        journal.append(PipelineName(pipeline), 1e9, msgspec.msgpack.encode(event), msgspec.msgpack.encode(notes))
    journal.close(5.0)


def write_sample(run: RunDir, number: int, text: str) -> None:
    path = run.rollouts("p") / "samples.jsonl"
    path.parent.mkdir(exist_ok=True)
    record = {"step": 0, "prompt": 1, "sample": number, "version": 0, "reward": 0.5, "advantage": 0.1, "length": 3}
    pieces = [{"by": "context", "text": "say>"}, {"by": "policy", "text": text}]
    with path.open("ab") as file:
        file.write(orjson.dumps(record | {"pieces": pieces}) + b"\n")


def opened(run: RunDir) -> RunReader:
    reader = RunReader(run.root)
    while not reader.refresh(5.0):
        pass
    return reader


def test_a_growing_file_is_never_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    original = Following.read

    def counted(self: Following) -> list[bytes]:
        lines = original(self)
        read.append(len(lines))
        return lines

    monkeypatch.setattr(Following, "read", counted)
    write_steps(run, *range(5))
    reader = opened(run)
    write_steps(run, 5)
    reader.refresh(5.0)
    reader.refresh(5.0)
    assert sum(read) == 6
    assert reader.folds.metrics.steps["p"]["step"] == 5


def test_a_torn_last_line_waits_for_its_end(run: RunDir):
    write_steps(run, 0)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"kind":"step","at":2.0,"pipe')
    reader = opened(run)
    assert reader.folds.metrics.lines == 1
    assert reader.share_read() == 1.0, "a killed run's last line has no end: there is nothing to wait for"
    with run.metrics_path.open("ab") as file:
        file.write(b'line":"p","step":1,"reward":0.5}\n')
    reader.refresh(5.0)
    assert reader.folds.metrics.steps["p"]["step"] == 1
    assert reader.folds.metrics.unreadable == 0


def test_the_present_of_a_long_run_does_not_wait_for_its_past(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.dashboard.io.run_reader.LONG_BYTES", 2000)
    monkeypatch.setattr("penstock.runtime.following.MAX_BYTES", 1000)
    write_steps(run, *range(2000))
    reader = RunReader(run.root)
    assert not reader.refresh(0.0)
    behind = answer(reader, "overview", {})
    assert behind["share_read"] < 0.1
    assert behind["pipelines"][0]["step"] == 2000
    assert max(behind["pipelines"][0]["reward"]["steps"]["x"]) < 100
    reader = opened(run)
    assert reader.share_read() == 1.0
    assert max(answer(reader, "overview", {})["pipelines"][0]["reward"]["steps"]["x"]) > 1990


def test_a_pipeline_that_was_done_long_ago_is_seen_at_once(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.dashboard.io.run_reader.LONG_BYTES", 2000)
    monkeypatch.setattr("penstock.runtime.following.MAX_BYTES", 1000)
    write_steps(run, *range(10))
    gauges = {"kind": "gauges", "at": 2e9, "pipelines": {"p": {"phase": "complete", "step": 10}}, "processes": {}}
    with run.metrics_path.open("ab") as file:
        file.write((orjson.dumps(gauges) + b"\n") * 100)
    reader = RunReader(run.root)
    assert not reader.refresh(0.0)
    behind = answer(reader, "overview", {})
    assert behind["pipelines"][0]["step"] == 10
    assert "p step 10 of 10" in behind["state"]["sentence"]


def test_the_journal_is_read_on_from_where_it_was(run: RunDir):
    said = ("p", {"type": "time_passed"}, {"said": ["one"]})
    write_events(run, said, said)
    reader = opened(run)
    write_events(run, ("p", {"type": "time_passed"}, {"said": ["two"]}), ("<pool>", {"type": "pool_time_passed"}, {}))
    while not reader.refresh(5.0):
        pass
    assert [remark.text for remark in reader.folds.rings["p"].remarks] == ["one", "one", "two"]
    assert (reader.seq, reader.folds.lanes.events) == (4, 1)


def test_a_damaged_journal_costs_the_journal_only(run: RunDir):
    write_steps(run, 0, 1)
    run.journal_path.write_bytes(b"not a database at all, but long enough to look at" * 50)
    reader = opened(run)
    found = answer(reader, "overview", {})
    assert "damaged" in found["journal_trouble"]
    assert found["pipelines"][0]["step"] == 2


def test_events_of_another_version_are_counted_and_passed_over(run: RunDir):
    write_events(
        run,
        ("p", {"type": "deliver", "rollouts": [{"unheard": "of"}]}, {}),
        ("p", {"type": "ask_lease"}, {"leases": "all"}),
        ("p", {"kind": "no type"}, {}),
        ("<pool>", {"type": "pool_move_done"}, {}),
        ("p", {"type": "time_passed"}, {"said": ["still read"]}),
    )
    reader = opened(run)
    assert answer(reader, "overview", {})["unread_events"] == 4
    assert [remark.text for remark in reader.folds.rings["p"].remarks] == ["still read"]


def test_samples_of_another_shape_are_shown_as_they_are(run: RunDir):
    path = run.rollouts("p") / "samples.jsonl"
    path.parent.mkdir()
    record = {"step": 0, "prompt": 1, "sample": 3, "version": 0, "reward": 1}
    for pieces in (None, 5, ["text"], [{"by": "policy"}]):
        path.write_bytes(orjson.dumps(record | {"pieces": pieces}) + b"\n")
        reader = opened(run)
        assert answer(reader, "samples", {})["rows"][0]["preview"] == ""
        assert answer(reader, "sample", {"source": "p/samples", "sample": "3"})["sample"]["pieces"] == pieces


def test_an_empty_run_answers_every_question(run: RunDir):
    reader = opened(run)
    queries = {"flow": {"pipeline": "p"}, "weights": {"pipeline": "p"}, "metric": {"pipeline": "p", "name": "loss"}}
    for view in ANSWERS.keys() - {"sample", "story", "log"}:
        found = answer(reader, view, queries.get(view, {}))
        assert found["state"]["word"] == "empty"
        orjson.dumps(found)


@pytest.mark.parametrize(
    "config",
    [
        b"[[pipeline\n",
        b"\xff",
        b"pipeline = ['name', 3]",
        b"pipeline = {name = 'q'}",
        b"[[pipeline]]\nname = 'q'\ntrain = 3",
    ],
)
def test_a_run_of_unreadable_configuration_goes_by_its_journal(run: RunDir, config: bytes):
    run.config_path.write_bytes(config)
    write_events(run, ("p", {"type": "time_passed"}, {}))
    assert [one.name for one in opened(run).pipelines] == ["p"]


@pytest.mark.parametrize("ending", ["", "[1]", '{"how": "exploded"}'])
def test_an_ending_that_makes_no_sense_spoils_nothing(run: RunDir, ending: str):
    write_steps(run, 0)
    run.ending_path.write_text(ending)
    assert answer(opened(run), "overview", {})["state"]["word"] in ("running", "failed")
    assert Shelf(run.root).listing()[0]["steps"] == {"p": {"step": 1, "reward": 0.0}}


def test_questions_that_make_no_sense_are_refused_with_a_sentence(run: RunDir):
    write_sample(run, 7, "ab")
    reader = opened(run)
    for view, query in [
        ("nothing", {}),
        ("flow", {"pipeline": "../../etc"}),
        ("log", {"process": "../token"}),
        ("log", {"process": "/etc/passwd"}),
        ("samples", {"source": "../../x"}),
        ("samples", {"first": "-1"}),
        ("samples", {"step": "9" * 400}),
        ("samples", {"low": "x"}),
        ("sample", {"source": "p/samples", "sample": "8"}),
        ("story", {"pipeline": "p", "kind": "secret", "number": "1"}),
        ("story", {"pipeline": "p", "kind": "sample", "number": "٣"}),
    ]:
        with pytest.raises(ConfigError):
            answer(reader, view, query)


def test_nothing_new_is_said_in_a_few_bytes(run: RunDir):
    write_steps(run, *range(100))
    reader = opened(run)
    first = answer(reader, "overview", {})
    again = answer(reader, "overview", {"seen": first["revision"]})
    assert again["unchanged"] is True
    assert "pipelines" not in again
    write_steps(run, 100)
    reader.refresh(5.0)
    assert "pipelines" in answer(reader, "overview", {"seen": first["revision"]})


def test_a_held_lock_is_a_live_run_and_looking_does_not_take_it(run: RunDir):
    assert not run.is_supervised()
    with run.lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert run.is_supervised()
    assert not run.is_supervised()


def test_the_end_of_a_log_is_read_and_no_more(run: RunDir):
    path = run.log_path("controller")
    path.write_text("".join(f"line {number}\n" for number in range(50_000)))
    tail = opened(run).log_tail("controller")
    assert tail.endswith("line 49999\n")
    assert len(tail) < 70_000
    assert all(line.startswith("line ") for line in tail.splitlines())


def test_a_link_among_the_logs_is_not_followed(run: RunDir, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("not of this run\n")
    run.log_path("linked").symlink_to(secret)
    run.log_path("controller").write_text("of this run\n")
    reader = opened(run)
    assert reader.log_tail("controller") == "of this run\n"
    assert "not of this run" not in str(reader._logs) + "".join(reader.log_tail(name) for name in reader._logs)
    assert "linked" not in reader._logs


def test_a_shelf_lists_its_runs_and_opens_no_other(tmp_path: Path):
    runs = [RunDir.create(tmp_path, name, CONFIG, "0.1.0") for name in ("a", "b")]
    write_steps(runs[0], 0, 1)
    runs[0].write_ending("complete")
    (tmp_path / "not-a-run").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text(json.dumps({"run_id": "x", "format": 99, "penstock": "9"}))
    shelf = Shelf(tmp_path)
    listed = {one["id"]: one for one in shelf.listing()}
    assert set(listed) == {runs[0].root.name, runs[1].root.name, "broken"}
    assert listed[runs[0].root.name]["ended"] == "complete"
    assert listed[runs[0].root.name]["steps"] == {"p": {"step": 2, "reward": 0.1}}
    assert "format 99" in listed["broken"]["trouble"]
    for name in ("..", "not-a-run", str(tmp_path), f"{runs[0].root.name}/../{runs[1].root.name}"):
        with pytest.raises(ConfigError):
            shelf.reader(name)


def test_few_runs_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.dashboard.io.shelf.MOST_OPEN", 2)
    names = [RunDir.create(tmp_path, name, CONFIG, "0.1.0").root.name for name in "abcd"]
    shelf = Shelf(tmp_path)
    first = shelf.reader(names[0])
    assert shelf.reader(names[0]) is first
    for name in names[1:]:
        shelf.reader(name)
    assert "2 runs open" in repr(shelf)
    assert shelf.reader(names[0]) is not first


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run in"):
        Shelf(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        Shelf(tmp_path / "nowhere")


def test_an_exported_run_is_one_file_with_everything_in_it(run: RunDir, tmp_path: Path):
    write_steps(run, *range(10))
    write_sample(run, 7, HOSTILE)
    run.log_path("controller").write_text("a line of its log\n")
    run.write_ending("complete")
    os.utime(run.metrics_path, (time.time() - 100, time.time() - 100))
    target = tmp_path / "shared.html"
    plotly = tmp_path / "plotly.js"
    plotly.write_text("var Plotly = {};")
    size = export(Shelf(run.root), run.root.name, target, plotly)
    text = target.read_text()
    assert size == len(text.encode())
    assert "<script>alert" not in text
    begin = text.index('id="exported">') + len('id="exported">')
    data = json.loads(text[begin : text.index("</script>", begin)])
    name = run.root.name
    assert data["answers"][f"{name}/overview?"]["state"]["word"] == "complete"
    assert data["answers"][f"{name}/sample?sample=7&source=p/samples"]["sample"]["pieces"][1]["text"] == HOSTILE
    assert "its log" in data["answers"][f"{name}/log?process=controller"]["text"]
    assert run.token() not in text
    with pytest.raises(ConfigError, match="no folder"):
        export(Shelf(run.root), name, tmp_path / "nowhere" / "x.html", plotly)
