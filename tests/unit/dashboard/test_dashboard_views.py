"""What is sent to the page: small whatever the run's length, and with the right sentence."""

from __future__ import annotations

import orjson
import pytest

from penstock.dashboard import views
from penstock.dashboard.log_lines import warned
from penstock.dashboard.metrics_fold import Trained
from penstock.dashboard.ring_fold import RingFold
from penstock.dashboard.sample_index import MOST_ROWS, SampleIndex
from penstock.dashboard.verdict import PipelineFacts
from penstock.dashboard.views import Folds, Pace

FACTS = PipelineFacts("p", steps=200_000, max_staleness=2, workers=2)


@pytest.fixture(scope="module")
def long_run() -> Folds:
    folds = Folds(rings={"p": RingFold("p")})
    gauge = {"phase": "running", "throttled": 1, "in_flight": 64, "samples_trained": 0, "dropped_outdated": 5}
    for start in range(0, 100_000, 1000):
        lines = []
        for step in range(start, start + 1000):
            at = 1000.0 + step
            figures = {"reward": step / 1e5, "step_s": 0.9, "turn_s": 0.0, "samples": 8, "staleness_mean": 1.0}
            lines.append(orjson.dumps({"kind": "step", "at": at, "pipeline": "p", "step": step, **figures}))
            if step % 2 == 0:
                values = {"p": gauge | {"samples_trained": 8 * step}}
                processes = {"p/w": {"loop_lag_p99_s": 0.01, "weights_last_pause_s": 0.1}}
                lines.append(orjson.dumps({"kind": "gauges", "at": at, "pipelines": values, "processes": processes}))
        folds.metrics.take(lines)
    return folds


def test_every_answer_about_a_long_run_is_small(long_run: Folds):
    answers = [
        views.overview(long_run, [FACTS]),
        views.flow(long_run, "p"),
        views.weights(long_run, FACTS),
        views.loops(long_run),
        views.pool(long_run, 2000.0),
        views.troubles(long_run, {}),
    ]
    assert max(len(orjson.dumps(answer)) for answer in answers) < 100_000


def test_the_overview_says_where_the_run_stands(long_run: Folds):
    (pipeline,) = views.overview(long_run, [FACTS])["pipelines"]
    assert (pipeline["step"], pipeline["steps"], pipeline["phase"]) == (100_000, 200_000, "running")
    assert pipeline["eta_s"] == pytest.approx(100_000)
    assert pipeline["figures"]["samples_per_s"] == pytest.approx(8.0)
    assert pipeline["samples_per_s"]["y"][5] == pytest.approx(8.0, rel=0.01)
    assert pipeline["waits"] == "The trainer is the slower side: workers are throttled 100% of the time."
    smooth, steps = pipeline["reward"]["smooth"], pipeline["reward"]["steps"]
    assert len(smooth["x"]) == len(steps["x"]) <= views.MOST_POINTS


@pytest.mark.parametrize(
    ("step_s", "turn_s", "throttled", "begins"),
    [
        (0.2, 0.0, 0.0, "The workers are the slower side: the trainer waits for samples 80%"),
        (0.9, 0.0, 0.1, "Balanced: the trainer computes 90%"),
        (0.3, 0.6, 0.1, "The trainer waits for its devices 60%"),
        (0.9, 0.0, 0.8, "The trainer is the slower side"),
    ],
)
def test_who_waits_for_whom(step_s: float, turn_s: float, throttled: float, begins: str):
    pace = Pace.of([Trained(float(second), second, 8, step_s, turn_s) for second in range(20)])
    assert pace.slower_side(throttled).startswith(begins)


def test_an_empty_run_is_drawn_too():
    folds = Folds()
    (pipeline,) = views.overview(folds, [FACTS])["pipelines"]
    assert (pipeline["step"], pipeline["eta_s"], pipeline["waits"]) == (0, None, "")
    assert views.flow(folds, "p")["stages"] == []
    assert views.weights(folds, FACTS)["versions"] == []
    assert views.pool(folds, 0.0)["devices"] == []


def test_evaluations_are_drawn_at_their_version():
    folds = Folds()
    figures = {"eval/reward": 0.5, "eval/reward_stderr": 0.1, "eval/count": 64}
    line = {"kind": "evaluation", "at": 1.0, "pipeline": "p", "due": 20, "version": 21, "took_s": 0.5, **figures}
    skipped = {
        "kind": "evaluation",
        "at": 1.0,
        "pipeline": "p",
        "due": 40,
        "version": 40,
        "took_s": 9.0,
        "skipped": "slow",
    }
    folds.metrics.take([orjson.dumps(line), orjson.dumps(skipped)])
    assert views.reward(folds, "p")["evaluations"] == {"eval/reward": {"x": [21.0], "y": [0.5], "error": [0.1]}}
    assert "due" not in folds.metrics.names("step", "p")


def test_warnings_are_found_among_the_lines_of_a_log():
    lines = [
        b"2026-01-02 03:04:05,678 INFO    controller penstock.x: all is well",
        b"2026-01-02 03:04:06,000 WARNING t penstock.lag: event loop of t blocked for 0.70 s in f (a.py:1)",
        b"2026-01-02 03:04:07,000 WARNING supervisor penstock.launch: w ended (SIGKILL); starting it again in 0.5 s",
        b"2026-01-02 03:04:08,000 ERROR   controller penstock.x: it broke \xff",
        b"Traceback (most recent call last):",
    ]
    found = warned(lines)
    assert [(one.kind, one.process) for one in found] == [
        ("blocked", "t"),
        ("restart", "supervisor"),
        ("warning", "controller"),
    ]
    assert [round(one.at - found[0].at, 3) for one in found] == [0.0, 1.0, 2.0]


def sample(number: int, reward: float = 0.0, step: int = 0) -> bytes:
    return orjson.dumps({"step": step, "prompt": 1, "sample": number, "version": 0, "reward": reward, "length": 2})


def test_samples_are_found_by_step_reward_and_number():
    index = SampleIndex()
    lines = [sample(number, reward=number / 10, step=number // 5) for number in range(20)]
    index.take(0, [*lines[:10], b"torn", *lines[10:]])
    assert index.left_out == 1
    rows, count = index.choose(count=3)
    assert ([row.sample for row in rows], count) == ([19, 18, 17], 20)
    assert [row.sample for row in index.choose(step=1, low=0.75)[0]] == [9, 8]
    assert [row.sample for row in index.choose(first=18)[0]] == [1, 0]
    text = b"\n".join([*lines[:10], b"torn", *lines[10:]])
    row = index.find(15)
    assert row is not None
    assert text[row.offset : row.offset + row.size] == lines[15]
    assert index.find(99) is None


def test_the_index_of_samples_is_bounded_and_keeps_early_ones():
    index = SampleIndex()
    line = sample(0)
    for batch in range(3 * MOST_ROWS // 10_000):
        index.take(batch * 10_000, [line] * 10_000)
    assert len(index.rows) <= MOST_ROWS
    assert index.rows[0].offset == 0
    assert index.rows[-1].offset > 290_000
