import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from penstock.launch.view import (
    Pace,
    PlainView,
    TerminalView,
    Tolerated,
    awaited_by,
    clock,
    duration,
    figure,
    sparkline,
)

PIPELINE = {
    "step": 3,
    "steps": 10,
    "phase": "running",
    "reward_mean": 0.25,
    "in_flight": 40,
    "staleness_mean": 1.0,
    "staleness_max": 2,
    "version": 3,
    "workers_alive": 1,
    "samples_trained": 384,
    "diagnosis": "",
}
STATUS = {
    "pipelines": {"letters": PIPELINE},
    "lag": {"p50_s": 0.0001, "p99_s": 0.0021, "max_s": 0.004, "wait_p99_s": 0.0034},
    "members": {"letters/w-1": {"loop_lag_wait_p99_s": 0.0071}, "letters/t": {"other": 1.0}},
    "supervisor": {"loop_lag_wait_p99_s": 0.0012},
}


def test_a_pace_foretells_the_end():
    pace = Pace()
    assert pace.eta_s(10) is None
    pace.observe(0.0, 0, 0)
    pace.observe(2.0, 4, 512)
    assert pace.samples_per_s == 256
    assert pace.eta_s(10) == 3.0


def test_a_pace_forgets_what_is_long_past():
    pace = Pace(window_s=10)
    pace.observe(0.0, 0, 0)
    for second in range(100, 120):
        pace.observe(float(second), second - 100, 0)
    assert pace.eta_s(29) == 10.0


def test_plain_lines_carry_every_figure():
    out = StringIO()
    view = PlainView(Console(file=out, width=300))
    view.update(STATUS)
    view.note("letters.rollout.0 ended (killed by SIGKILL); starting it again in 0.5 s")
    text = out.getvalue()
    assert "letters: step 3/10 (running)  reward 0.25" in text
    assert "staleness 1.0 / 2" in text
    assert "killed by SIGKILL" in text


def test_the_newest_evaluation_stands_beside_the_reward():
    out = StringIO()
    PlainView(Console(file=out, width=300)).update({"pipelines": {"letters": PIPELINE | {"eval_points": 0}}})
    assert "reward 0.25  eval -  samples/s" in out.getvalue()
    evaluated = {"eval_points": 1, "eval_reward": 0.875, "eval_version": 2}
    PlainView(Console(file=out, width=300)).update({"pipelines": {"letters": PIPELINE | evaluated}})
    assert "eval 0.875 (v2)" in out.getvalue()


def test_plain_lines_do_not_flood():
    out = StringIO()
    view = PlainView(Console(file=out, width=300))
    for _ in range(100):
        view.update(STATUS)
    assert len(out.getvalue().splitlines()) == 1


def test_a_pipeline_that_is_over_has_one_last_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.launch.view.PLAIN_EVERY_S", 0.0)
    out = StringIO()
    view = PlainView(Console(file=out, width=300))
    for phase in ("running", "complete", "complete", "complete"):
        view.update({"pipelines": {"short": PIPELINE | {"phase": phase}, "long": PIPELINE}})
    lines = out.getvalue().splitlines()
    assert [line[:25] for line in lines if line.startswith("short")] == [
        "short: step 3/10 (running",
        "short: step 3/10 (complet",
    ]
    assert len([line for line in lines if line.startswith("long")]) == 4


def test_the_time_of_each_stage_is_shown():
    stages = {"letters": {"lease_s": 0.0, "generate_s": 0.25, "score_s": 12.0, "wait_s": 0.002, "step_s": 1.5}}
    for view in (PlainView, lambda console: TerminalView(console, "title")):
        out = StringIO()
        shown = view(Console(file=out, width=100, height=40, force_terminal=False))
        shown.update(STATUS | {"stages": stages, "slow": {"letters": "reward judge running for 9 s"}})
        shown.close()
        expected = "generate 250 ms · score 12 s · wait 2 ms · train 1.5 s · reward judge running for 9 s"
        assert expected in out.getvalue()


def test_trained_lengths_that_differ_from_the_generated_ones_are_shown():
    for view in (PlainView, lambda console: TerminalView(console, "run")):
        out = StringIO()
        shown = view(Console(file=out, width=160))
        shown.update(STATUS | {"biased": {"letters": "trained samples are 5.0% shorter"}})
        shown.close()
        assert "trained samples are 5.0% shorter" in out.getvalue()


def test_a_stall_is_shown():
    out = StringIO()
    stalled = PIPELINE | {"diagnosis": "trainer has waited 61 s for a batch"}
    PlainView(Console(file=out, width=300)).update({"pipelines": {"letters": stalled}})
    assert "trainer has waited 61 s for a batch" in out.getvalue()


def test_the_terminal_view_draws_a_panel_per_pipeline():
    out = StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    view = TerminalView(console, "runs/demo")
    view.update(STATUS)
    view.update({"pipelines": {"letters": PIPELINE | {"reward_mean": 0.5, "step": 4}}})
    view.update(STATUS)
    view.note("a worker was replaced")  # shown though no status follows
    view.close()
    text = out.getvalue()
    assert "letters · running" in text
    assert "a worker was replaced" in text
    assert "step 3/10" in text


def test_clock():
    assert [clock(None), clock(5), clock(65), clock(3700)] == ["-", "0:05", "1:05", "1:01:40"]


def test_sparkline():
    assert sparkline([], 10) == ""
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 72)) == 72


def use(devices: list[int], pipeline: str, doing: str, since_s: float) -> dict:
    return {"devices": devices, "pipeline": pipeline, "member": f"{pipeline}.x", "doing": doing, "since_s": since_s}


def share(pipeline: str, trouble: str = "") -> dict:
    return {"pipeline": pipeline, "trouble": trouble}


POOL = {
    "devices": 8,
    "generating": 3,
    "held": 2,
    "moving": 1,
    "idle": 2,
    "moves": 37,
    "failed_moves": 1,
    "shares": [share("left", "left has 64 samples to generate and has had no worker for 12 s: right.0 is on [2]")],
    "uses": [
        use([0, 1], "right", "training", 12.0),
        use([2], "right", "generating", 40.0),
        use([3], "right", "generating", 4.0),
        use([5], "right", "generating", 4.0),
        use([6], "left", "waking", 1.0),
    ],
    "waiting": ["left.trainer (training) has waited 3 s for 2 of devices [0, 1]: right.trainer is training on [0, 1]"],
}


def test_plain_lines_say_who_is_on_which_device_and_who_waits():
    out = StringIO()
    PlainView(Console(file=out, width=300), shares_devices=True).update({"pipelines": {"left": PIPELINE}, "pool": POOL})
    lines = out.getvalue().splitlines()
    assert lines[1] == (
        "pool: 0-1 right training  2-3 right generating  5 right generating  6 left waking  2 idle  37 moves (1 failed)"
    )
    assert lines[2].startswith("pool: left has 64 samples to generate and has had no worker for 12 s")
    assert lines[3].startswith("pool: left.trainer (training) has waited 3 s for 2 of devices [0, 1]")


def test_devices_that_are_not_shared_are_not_shown_but_trouble_with_them_is():
    out = StringIO()
    PlainView(Console(file=out, width=300)).update(STATUS | {"pool": POOL | {"waiting": []}})
    assert "pool" not in out.getvalue()
    troubled = POOL | {"shares": [share("letters", "letters.rollout.0 did not wake on [1]")]}
    PlainView(Console(file=out, width=300)).update(STATUS | {"pool": troubled})
    assert "pool: letters.rollout.0 did not wake on [1]" in out.getvalue()


def test_who_is_awaited_is_said_instead_of_zeros_and_of_troubles_with_devices():
    out = StringIO()
    fresh = PIPELINE | {"step": 0, "workers_alive": 0, "trainer_alive": 0}
    pool = POOL | {
        "waiting": [],
        "shares": [share("letters", "letters has 64 samples to generate, but no live worker")],
    }
    PlainView(Console(file=out, width=300)).update({"pipelines": {"letters": fresh}, "pool": pool})
    assert out.getvalue().splitlines() == [
        "letters: step 0/10 (running)  waiting for a rollout worker and the trainer to start"
    ]


def test_nothing_is_awaited_while_the_run_ends():
    gone = PIPELINE | {"workers_alive": 0, "trainer_alive": 0}
    assert awaited_by(gone) == "waiting for a rollout worker and the trainer to start"
    assert awaited_by(gone | {"ending": True}) == ""


@pytest.mark.parametrize(("seconds", "shown"), [(2.5, "2.5 s"), (0.0126, "12.6 ms"), (2.83e-7, "0.283 µs")])
def test_a_duration_has_the_unit_that_suits_it(seconds: float, shown: str):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("changed", "awaited"),
    [
        ({"workers_alive": 2, "workers_loading": 2}, "waiting for the engine of a rollout worker to load"),
        ({"workers_alive": 2, "workers_loading": 1}, ""),
        ({"phase": "draining", "step": 10}, "saving the last checkpoint"),
        ({"phase": "draining", "step": 10, "eval_running": 1}, "waiting for the last evaluation"),
        ({"phase": "draining", "step": 9}, ""),
        ({"phase": "complete", "step": 10}, ""),
    ],
)
def test_what_keeps_a_pipeline_waiting_is_said(changed: dict[str, object], awaited: str) -> None:
    assert awaited_by(PIPELINE | {"trainer_alive": 1} | changed) == awaited


def test_the_terminal_view_draws_the_pool():
    out = StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=True, color_system=None)
    view = TerminalView(console, "runs/demo", shares_devices=True)
    view.update({**STATUS, "pipelines": {"left": PIPELINE}, "pool": POOL})
    view.close()
    text = out.getvalue()
    assert "pool · 3 generating, 2 held by trainers, 1 moving, 2 idle · 37 moves (1 failed)" in text
    assert "2-3      right     generating  4 s" in text
    assert "left has 64 samples to generate and has had no worker for 12 s" in text


def drawn(status: dict[str, Any], width: int, height: int) -> list[str]:
    """The last frame, line by line."""
    out = StringIO()
    view = TerminalView(Console(file=out, width=width, height=height, force_terminal=True, color_system=None), "runs/x")
    out.truncate(out.seek(0))
    view.update(status)
    view.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "").splitlines()


def test_many_pipelines_in_a_low_terminal_take_a_line_each_and_notes_stay_in_sight():
    pipelines = {f"pipeline{number}": PIPELINE for number in range(8)}
    lines = drawn(STATUS | {"pipelines": pipelines}, 80, 24)
    assert sum(line.startswith("pipeline") and "3/10" in line for line in lines) == 8
    assert "loop lag: controller 3.4 ms, w-1 7.1 ms" in lines[-1]
    assert any("╭─ pipeline7" in line for line in drawn(STATUS | {"pipelines": pipelines}, 80, 60))


def test_a_panel_fits_eighty_columns():
    """No figure is folded or cut, whatever its size."""
    one = PIPELINE | {"reward_mean": -1234.56, "eval_points": 1, "eval_reward": -1234.56, "eval_version": 12345}
    lines = drawn({"pipelines": {"a-pipeline-with-a-name-of-some-length": one | {"steps": 1_000_000}}}, 80, 24)
    assert "a-pipeline-with-a-name-…" in lines[0]
    assert any("-1,235" in line and "-1,235 (v12345)" in line and "1.0 / 2" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_figures_keep_their_digits():
    assert [figure(value) for value in (0.0, 0.12345, -1234.5, 12345678.0, 1.2e-7)] == [
        "0",
        "0.123",
        "-1,234",
        "1.23e+07",
        "1.2e-07",
    ]


def test_the_start_is_no_part_of_the_pace():
    pace = Pace()
    for second in range(20):
        pace.observe(float(second), 0, 0)
    pace.observe(20.0, 1, 128)
    assert pace.samples_per_s == 128


def test_steps_longer_than_the_window_have_a_pace_too():
    pace = Pace(window_s=30)
    for second in range(0, 601, 1):
        pace.observe(float(second), second // 100, second // 100 * 64)
    assert pace.eta_s(12) == pytest.approx(600, rel=0.4)
    assert pace.samples_per_s == pytest.approx(0.64, rel=0.4)


@pytest.mark.parametrize("mean", [None, float("inf"), float("nan")])
def test_figures_that_are_not_finite_are_shown(mean: float | None) -> None:
    out = StringIO()
    one = PIPELINE | {"reward_mean": mean, "eval_reward": mean, "eval_version": 2, "eval_points": 1}
    for view in (PlainView(Console(file=out, width=300)), TerminalView(Console(file=out, width=100), "title")):
        view.update(STATUS | {"pipelines": {"letters": one}})
        view.update(STATUS | {"pipelines": {"letters": PIPELINE | {"step": 4}}})
        view.close()
    assert "reward not finite" in out.getvalue()


def test_what_samples_and_names_contain_drives_no_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07 [/b] [link=x]"
    for view_of in (lambda out: PlainView(out), lambda out: TerminalView(out, hostile)):
        out = StringIO()
        view = view_of(Console(file=out, width=200, height=50, force_terminal=False, color_system=None))
        view.note(hostile)
        view.update({"pipelines": {"[/b]": PIPELINE | {"diagnosis": hostile}}})
        view.close()
        assert "\x1b" not in out.getvalue()
        assert "\x07" not in out.getvalue()
        assert "[/b] [link=x]" in out.getvalue()


def test_the_error_of_a_view_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def update(self, status: dict[str, Any]) -> None:
            raise KeyError("no such figure")

        def note(self, line: str) -> None:
            raise OSError("the terminal is gone")

        def close(self) -> None:
            raise RuntimeError

    view = Tolerated(Broken())
    for _ in range(3):
        view.update({})
        view.note("x")
        view.close()
    assert len(caplog.records) == 3
