import json
import os
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.launch.gpus import GpuWatch
from penstock.launch.summary import plot, print_summary, read_curves
from penstock.runtime.rundir import RunDir


def step(number: int, reward: float, pipeline: str = "letters") -> str:
    entry = {"kind": "step", "pipeline": pipeline, "step": number, "reward": reward, "at": float(number)}
    return json.dumps(entry | {"staleness_mean": 1.25, "staleness_max": 2})


def test_a_step_trained_again_replaces_its_first_try(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join([step(0, 0.1), step(1, 0.2), step(1, 0.4), '{"kind": "step", "pipel']))
    assert read_curves(metrics)["letters"].points() == [(0, 0.1), (1, 0.4)]


def test_no_metrics_no_curves(tmp_path: Path):
    assert read_curves(tmp_path / "absent.jsonl") == {}


def test_the_summary_names_everything_and_writes_the_plot(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    lines = [step(i, i / 100) for i in range(100)] + [step(i, 4.0 * i, "pole") for i in range(100)]
    run.metrics_path.write_text("\n".join(lines))
    one = {
        "step": 100,
        "steps": 100,
        "samples_trained": 12800,
        "dropped_outdated": 3,
        "dropped_filtered": 0,
        "dropped_failed": 1,
    }
    lag = {"p50_s": 0.001, "p99_s": 0.002, "max_s": 0.003, "wait_p99_s": 0.0025, "worst_s": 0.012}
    loops = {"letters/w": {"loop_lag_worst_s": 0.04}, "supervisor": {"loop_lag_worst_s": 0.005}}
    status = {"pipelines": {"letters": one, "pole": one}, "lag": lag, "loops": loops}
    out = StringIO()
    print_summary(Console(file=out, width=200), run, status, wall_s=61.0, ended="complete")
    text = out.getvalue()
    assert "complete after 61 s" in text
    assert "0.045 → 0.945" in text
    assert "outdated 3, failed 1" in text
    assert "1.25 / 2" in text
    assert "p99 2.0 ms, worst of the run 12 ms" in text
    assert "worst of the other loops: w 40 ms, supervisor 5 ms" in text
    assert str(run.root) in text
    assert (run.plots / "rewards.png").stat().st_size > 1000
    assert (run.plots / "rewards.svg").exists()


def test_the_summary_of_the_demo_fits_eighty_columns(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    entry = {"kind": "evaluation", "pipeline": "cartpole", "version": 0, "eval/reward": 8.75, "eval/reward_stderr": 0}
    run.metrics_path.write_text("\n".join([*(step(i, 51.25 * i, "cartpole") for i in range(10)), json.dumps(entry)]))
    one = {"step": 240, "steps": 240, "samples_trained": 30720, "dropped_outdated": 0}
    out = StringIO()
    print_summary(Console(file=out, width=80), run, {"pipelines": {"cartpole": one}}, wall_s=28.0, ended="complete")
    title, _, _, row, *_ = out.getvalue().splitlines()  # two lines of headings
    assert title == f"{run.root.name}: complete after 28 s"
    assert " ".join(row.split()) == "cartpole 240/240 231 → 231 8.75 → 8.75 ± 0 30,720 none 1.25 / 2"


def test_many_pipelines_and_a_single_step_are_drawn(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    run.metrics_path.write_text("\n".join(step(0, -1e-7, f"pipeline{number}") for number in range(8)))
    picture = plot(run)
    assert picture is not None
    assert "pipeline7" in picture.with_suffix(".svg").read_text()


def test_evaluations_are_in_the_summary_and_beside_the_curve(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    entry = {"kind": "evaluation", "pipeline": "letters", "at": 0.0}
    points = [(0, 0.125, 0.01), (10, 0.5, 0.02), (20, 0.75, 0.03)]
    lines = [step(i, i / 100) for i in range(20)]
    lines += [
        json.dumps(entry | {"version": version, "due": version, "eval/reward": reward, "eval/reward_stderr": error})
        for version, reward, error in points
    ]
    lines.append(json.dumps(entry | {"version": None, "due": 15, "skipped": "superseded by version 20"}))
    run.metrics_path.write_text("\n".join(lines))
    assert read_curves(run.metrics_path)["letters"].evaluations == {0: (0.125, 0.01), 10: (0.5, 0.02), 20: (0.75, 0.03)}
    out = StringIO()
    one = {"step": 20, "steps": 20, "samples_trained": 128}
    print_summary(Console(file=out, width=200), run, {"pipelines": {"letters": one}}, wall_s=1.0, ended="complete")
    assert "first → last" in out.getvalue()
    assert "0.125 → 0.75 ± 0.03" in out.getvalue()
    assert "evaluation" in (run.plots / "rewards.svg").read_text()


def test_the_summary_says_who_waited_for_whom_and_how_busy_the_gpus_were(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    timed = {"wait_s": 0.9, "step_s": 0.6, "turn_s": 0.1, "publish_s": 0.05}
    run.metrics_path.write_text("\n".join(json.dumps(json.loads(step(i, 0.5)) | timed) for i in range(11)))
    one = {"step": 11, "steps": 11, "samples_trained": 88, "throttled_s": 4.0}
    watch = GpuWatch()
    watch.samples = [(-1.0, {0: 0.0, 1: 0.0}), (5.0, {0: 0.9, 1: 0.0}), (6.0, {0: 0.8, 1: 0.0})]
    out = StringIO()
    status = {"pipelines": {"letters": one}}
    print_summary(Console(file=out, width=200), run, status, wall_s=12.0, ended="complete", busy=watch.busy)
    text = out.getvalue()
    assert "the trainer trained 60% of the time and waited for samples 30% and for devices 10%" in text
    assert "the staleness bound held leases back 40%" in text
    assert "busy since the first step: GPU 0 85%" in text


def test_the_summary_says_when_short_samples_were_trained_more(tmp_path: Path):
    run = RunDir.create(tmp_path, "demo", "", "0")
    one = {"step": 10, "steps": 10, "samples_trained": 80}
    for dropped_length, shown in ((60.0, True), (51.0, False)):
        figures = {"samples": 8, "completion_length_mean": 50.0, "dropped": 4, "dropped_length_mean": dropped_length}
        run.metrics_path.write_text("\n".join(json.dumps(json.loads(step(i, 0.5)) | figures) for i in range(10)))
        out = StringIO()
        status = {"pipelines": {"letters": one}}
        print_summary(Console(file=out, width=200), run, status, wall_s=12.0, ended="complete")
        text = "trained samples are 6.2% shorter than generated ones, of which 33% were dropped as outdated"
        assert (text in out.getvalue()) == shown


def test_time_without_the_run_is_not_waited(tmp_path: Path):
    """Neither the pause before a resume with the start after it, nor steps that are trained again."""
    metrics = tmp_path / "metrics.jsonl"

    def trained(number: int, at: float) -> str:
        return json.dumps(json.loads(step(number, 0.5)) | {"at": at, "step_s": 0.75})

    def gauges(at: float) -> str:
        return json.dumps({"kind": "gauges", "at": at, "pipelines": {}, "processes": {}})

    first = [trained(number, float(number)) for number in range(5)]
    resumed = [gauges(5.0), *(gauges(900.0 + 2 * number) for number in range(20)), trained(5, 940.0)]
    again = [trained(4, 950.0), trained(5, 951.0)]
    metrics.write_text("\n".join([*first, *resumed, trained(6, 941.0), *again]))
    shares = read_curves(metrics)["letters"].shares(0.0)
    assert shares.startswith("the trainer trained 75% of the time and waited for samples 25%;")


def test_the_driver_is_asked_how_busy_the_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, 40'\necho '1, 0'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with GpuWatch(every_s=0.01) as watch:
        deadline = time.monotonic() + 10
        while not watch.samples and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watch.busy() == {0: 0.4}
