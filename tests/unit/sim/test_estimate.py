"""Durations out of a run's metrics."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from penstock.errors import ConfigError
from penstock.runtime.rundir import RunDir
from penstock.sim.estimate import durations_in, samples_per_s_in


def lines(pipeline: str, step_s: float) -> list[dict[str, object]]:
    durations = {"step_s": step_s, "fetch_s": 0.1, "publish_s": 0.2, "score_s": 0.5, "deliver_s": 0.005}
    steps = [
        {"kind": "step", "pipeline": pipeline, "at": number * 1.5, "samples": 4, **durations} for number in range(10)
    ]
    gauges = [
        {
            "kind": "gauges",
            "processes": {
                "controller": {"loop_lag_p99_s": 0.1},
                f"{pipeline}/{pipeline}.rollout.0-ab": {
                    "generate_s": 4.0 * number,
                    "batches": 2.0 * number,
                    "weights_last_update_s": 0.3,
                },
            },
        }
        for number in range(3)
    ]
    return [*steps, *gauges]


def test_each_pipeline_has_its_own_durations(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "", "0")
    run.metrics_path.write_bytes(b"\n".join(map(orjson.dumps, [*lines("a", 1.0), *lines("b", 1.25)])) + b"\n")
    first, second = durations_in(run.root, "a"), durations_in(run.root, "b")
    assert (first.sample_s, first.postprocess_s, first.publish_s, first.spread) == (2.0, 0.5, 0.2, 0.0)
    assert first.latency_s == pytest.approx(0.002)
    assert first.step_s == second.step_s == 1.5, "with what lies between two steps"
    assert samples_per_s_in(run.root, "a") == pytest.approx(4 / 1.5)
    with pytest.raises(ConfigError, match="too few steps"):
        durations_in(run.root, "c")


def test_a_wait_for_samples_is_not_counted_between_two_steps(tmp_path: Path) -> None:
    """It is simulated. A batch that took longer than the step before was waited for."""
    run = RunDir.create(tmp_path, "run", "", "0")
    late = [one | {"batch_s": 1.2} if one["kind"] == "step" else one for one in lines("a", 1.0)]
    run.metrics_path.write_bytes(b"\n".join(map(orjson.dumps, late)) + b"\n")
    assert durations_in(run.root, "a").step_s == pytest.approx(1.005)
