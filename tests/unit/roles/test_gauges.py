"""What the controller writes about the present: complete, short, and not mistaken for a step."""

from __future__ import annotations

from penstock.control.io.metric_lines import entries_in, gauges_of

STATUS = {
    "at": 12.5,
    "lag": {"p50_s": 0.0012345678, "worst_s": 0.5},
    "pipelines": {"letters": {"phase": "running", "step": 3, "reward_mean": 1 / 3}},
    "members": {"letters/letters.trainer-1": {"loop_lag_p50_s": 0.25}},
    "pool": {"devices": 4},
}


def test_every_pipeline_and_process_has_its_figures():
    line = gauges_of(STATUS)
    assert line["kind"] == "gauges"
    assert line["at"] == 12.5
    assert line["pipelines"] == {"letters": {"phase": "running", "step": 3, "reward_mean": 0.333333}}
    assert line["processes"] == {
        "controller": {"loop_lag_p50_s": 0.001235, "loop_lag_worst_s": 0.5},
        "letters/letters.trainer-1": {"loop_lag_p50_s": 0.25},
    }


def test_gauges_are_no_steps():
    """A reader of lines by `pipeline` and `step` at the top must pass them over."""
    assert not {"pipeline", "step"} & gauges_of(STATUS).keys()


def test_only_whole_lines_of_steps_count_as_written():
    lines = [
        b'{"kind":"gauges","at":1.0,"pipelines":{"p":{"step":7}},"processes":{}}\n',
        b'{"kind":"step","at":1.0,"pipeline":"p","step":3}\n',
        b'{"kind":"step","at":1.0,"pipeline":"p","st',
    ]
    assert entries_in(lines) == {("p", "step", 3)}
