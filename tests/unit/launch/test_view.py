from io import StringIO

from rich.console import Console

from penstock.launch.view import Pace, PlainView, TerminalView, clock, sparkline

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
    pace.saw(0.0, 0, 0)
    pace.saw(2.0, 4, 512)
    assert pace.samples_per_s == 256
    assert pace.eta_s(10) == 3.0


def test_a_pace_forgets_what_is_long_past():
    pace = Pace(window_s=10)
    pace.saw(0.0, 0, 0)
    for second in range(100, 120):
        pace.saw(float(second), second - 100, 0)
    assert pace.eta_s(29) == 10.0


def test_plain_lines_carry_every_figure():
    out = StringIO()
    view = PlainView(Console(file=out, width=300))
    view.update(STATUS)
    view.note("letters.rollout.0 ended (killed by SIGKILL); starting it again in 0.5 s")
    text = out.getvalue()
    assert "letters: step 3/10 (running)  reward 0.25" in text
    assert "loop lag p99 2.1 ms wait-p99 3.4 ms" in text
    assert "(letters/w-1 wait-p99 7.1 ms)" in text
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


def test_a_stall_is_shown():
    out = StringIO()
    stalled = PIPELINE | {"diagnosis": "trainer waits for a batch since 61 s"}
    PlainView(Console(file=out, width=300)).update({"pipelines": {"letters": stalled}})
    assert "trainer waits for a batch since 61 s" in out.getvalue()


def test_the_terminal_view_draws_a_panel_per_pipeline():
    out = StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    view = TerminalView(console, "runs/demo")
    view.update(STATUS)
    view.update({"pipelines": {"letters": PIPELINE | {"reward_mean": 0.5, "step": 4}}})
    view.note("a worker was replaced")
    view.update(STATUS)
    view.close()
    text = out.getvalue()
    assert "letters · running" in text
    assert "a worker was replaced" in text
    assert "step 3/10" in text


def test_clock():
    assert [clock(None), clock(5), clock(65), clock(3700)] == ["-", "0:05", "1:05", "1:01:40"]


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 72


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
    "shares": [share("left", "left has 64 samples to generate and no worker since 12 s: right.0 is generating on [2]")],
    "uses": [
        use([0, 1], "right", "training", 12.0),
        use([2], "right", "generating", 40.0),
        use([3], "right", "generating", 4.0),
        use([5], "right", "generating", 4.0),
        use([6], "left", "waking", 1.0),
    ],
    "waiting": ["left.trainer (training) waits for 2 of devices [0, 1] since 3 s: right.trainer is training on [0, 1]"],
}


def test_plain_lines_say_who_is_on_which_device_and_who_waits():
    out = StringIO()
    PlainView(Console(file=out, width=300)).update(STATUS | {"pool": POOL})
    lines = out.getvalue().splitlines()
    assert lines[1] == (
        "pool: 0-1 right training  2-3 right generating  5 right generating  6 left waking  2 idle  37 moves (1 failed)"
    )
    assert lines[2].startswith("pool: left has 64 samples to generate and no worker since 12 s")
    assert lines[3].startswith("pool: left.trainer (training) waits for 2 of devices [0, 1] since 3 s")


def test_a_pipeline_alone_on_its_devices_has_no_pool_to_look_at():
    out = StringIO()
    alone = POOL | {"shares": [share("letters")], "waiting": []}
    PlainView(Console(file=out, width=300)).update(STATUS | {"pool": alone})
    assert "pool" not in out.getvalue()


def test_the_terminal_view_draws_the_pool():
    out = StringIO()
    view = TerminalView(Console(file=out, width=120, force_terminal=True, color_system=None), "runs/demo")
    view.update(STATUS | {"pool": POOL})
    view.close()
    text = out.getvalue()
    assert "pool · 3 generating, 2 held by trainers, 1 moving, 2 idle · 37 moves (1 failed)" in text
    assert "2-3      right     generating  4 s" in text
    assert "left has 64 samples to generate and no worker since 12 s" in text
