"""Predicts the throughput of a configuration from a few durations, measured in a run or assumed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson

from penstock.config.load import load
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.runtime.rundir import RunDir
from penstock.sim.parts import Work
from penstock.sim.plan import Plan, Report

Simulate = Callable[[Plan], Report]
STEPS = 100
COMMIT_S = 0.001
WARM_UP = 0.25
"""Share of the steps that are not counted, in the run and in the simulation: the start is slower."""


class Point(msgspec.Struct, frozen=True):
    """One simulated configuration of a pipeline."""

    workers: int
    max_staleness: int
    samples_per_s: float
    trainer_idle: float
    workers_idle: float
    staleness: float

    @property
    def bottleneck(self) -> str:
        return "trainer" if self.trainer_idle < self.workers_idle else "workers"

    @property
    def idle(self) -> float:
        """Share of device time without training or generation, with one device per process."""
        return (self.trainer_idle + self.workers * self.workers_idle) / (1 + self.workers)


class Capacity(msgspec.Struct, frozen=True):
    """Predicted throughput of a pipeline as configured, and with similar settings."""

    pipeline: str
    configured: Point
    one_more_worker: Point
    larger_bound: Point
    measured: float | None
    """Samples/s of the run with the measured durations."""
    curves: dict[int, list[Point]]
    """By staleness bound: a point for each number of workers."""


def durations_in(root: Path, pipeline: str) -> Work:
    """Durations of one pipeline from the metrics of a run, including the effect of processes on the same cores."""
    steps: list[float] = []
    ended: list[float] = []
    fetched: list[float] = []
    published: list[float] = []
    answered: list[float] = []
    scored: list[float] = []
    delivered: list[float] = []
    generated: dict[str, list[tuple[float, float]]] = {}
    updates: list[float] = []
    run = RunDir.open(root)
    for line in run.read(run.metrics_path).splitlines() if run.metrics_path.exists() else ():
        entry = orjson.loads(line)
        if entry["kind"] == "step" and entry["pipeline"] == pipeline:
            steps.append(entry["step_s"])
            ended.append(entry["at"])
            published.append(entry.get("publish_s", 0.01))
            fetched.append(entry["fetch_s"])
            answered.append(entry.get("batch_s", 0.0))
            scored.append(entry.get("score_s", 0.0))
            delivered.append(entry.get("deliver_s", 0.0))
        elif entry["kind"] == "gauges":
            for name, values in entry["processes"].items():
                if not name.startswith(f"{pipeline}/"):
                    continue
                if "generate_s" in values and "batches" in values:
                    generated.setdefault(name, []).append((values["generate_s"], values["batches"]))
                if values.get("weights_last_update_s"):
                    updates.append(values["weights_last_update_s"])
    ranges = [(seen[int(WARM_UP * len(seen))], seen[-1]) for seen in generated.values()]
    spent_s, batches = (sum(last[one] - first[one] for first, last in ranges) for one in range(2))
    if len(steps) < 4 or not batches:
        raise ConfigError(f"{root} has too few steps to measure durations: train longer")
    warm = max(2, int(WARM_UP * len(steps)))
    step_s = statistics.mean(steps[warm:])
    # Between two steps: the acknowledgement, and at times a wait for samples, which is simulated. The first is measured
    # where the batch was ready before the previous step ended; if there is no such step, it is one call.
    deliver_s = statistics.mean(delivered[warm:])
    between = [
        ended[k] - ended[k - 1] - steps[k] for k in range(warm, len(steps)) if answered[k] + fetched[k] < steps[k - 1]
    ]
    between_s = max(0.0, statistics.mean(between)) if len(between) > 2 else deliver_s
    return Work(
        sample_s=spent_s / batches,
        step_s=step_s + between_s,
        fetch_weights_s=statistics.mean(updates) if updates else 0.01,
        publish_s=statistics.mean(published[warm:]),
        fetch_s=statistics.mean(fetched[warm:]),
        postprocess_s=statistics.mean(scored[warm:]),
        save_s=0.05,
        # A delivery never waits: it takes two latencies and a commit.
        latency_s=max(0.0005, (deliver_s - COMMIT_S) / 2),
        commit_s=COMMIT_S,
        spread=min(0.9, 3**0.5 * statistics.pstdev(steps[warm:]) / step_s),
    )


def samples_per_s_in(root: Path, pipeline: str) -> float:
    """Throughput of a run after its warm-up."""
    run = RunDir.open(root)
    steps = [
        (entry["at"], entry["samples"])
        for line in run.read(run.metrics_path).splitlines()
        if (entry := orjson.loads(line))["kind"] == "step" and entry["pipeline"] == pipeline
    ]
    steady = steps[int(WARM_UP * len(steps)) :]
    return sum(samples for _, samples in steady[1:]) / (steady[-1][0] - steady[0][0])


def estimate(config_path: Path, run: Path | None, simulate: Simulate) -> list[Capacity]:
    """Predictions for each pipeline: as configured, with other numbers of workers, and with another staleness bound."""
    config = load(config_path)
    return [_capacity(config, one, run, simulate) for one in config.pipeline]


def _capacity(config: Config, pipeline: PipelineSection, run: Path | None, simulate: Simulate) -> Capacity:
    work = durations_in(run, pipeline.name) if run is not None else Work()
    workers, bound = pipeline.rollout.workers, pipeline.train.max_staleness
    alone = config.model_copy(update={"pipeline": [pipeline]})

    @functools.cache
    def point(workers: int, bound: int) -> Point:
        plan = Plan(steps=min(pipeline.steps, STEPS), work=work, config=simulated(alone, workers, bound))
        return _measured(simulate(plan), workers, bound)

    measured = samples_per_s_in(run, pipeline.name) if run is not None else None
    around = sorted({1, *_around(workers)})
    return Capacity(
        pipeline=pipeline.name,
        configured=point(workers, bound),
        one_more_worker=point(workers + 1, bound),
        larger_bound=point(workers, bound + 1),
        measured=measured,
        curves={limit: [point(count, limit) for count in around] for limit in (bound, bound + 1)},
    )


def _around(workers: int) -> list[int]:
    """Numbers of workers in a plot: about half to twice the configured number."""
    step = max(1, workers // 2)
    return [workers - step, workers, workers + 1, workers + step, workers + 2 * step][workers == 1 :]


def simulated(config: Config, workers: int, bound: int) -> Config:
    """The same run for a simulated model, without devices, network and other processes."""
    pipelines = [
        one.model_copy(
            update={
                "steps": min(one.steps, STEPS),
                "rollout": one.rollout.model_copy(
                    update={"workers": workers, "device": "cpu", "ring_mb": 4, "ranks": 1, "workload": None}
                ),
                "train": one.train.model_copy(update={"max_staleness": bound, "device": "cpu"}),
                "weights": one.weights.model_copy(update={"transport": "files"}),
                "samples": one.samples.model_copy(update={"save_every_steps": 0}),
            }
        )
        for one in config.pipeline
    ]
    return config.model_copy(
        update={"pipeline": pipelines, "payload": config.payload.model_copy(update={"transport": "shm"})}
    )


def _measured(report: Report, workers: int, bound: int) -> Point:
    times = next(iter(report.steps.values()))
    first = int(WARM_UP * len(times))
    span_s = times[-1] - times[first]
    whole_s = times[-1] - times[0]
    samples = report.samples * (len(times) - 1 - first) / len(times)
    ages = sum(age * count for age, count in report.staleness.items()) / max(1, sum(report.staleness.values()))
    return Point(
        workers=workers,
        max_staleness=bound,
        samples_per_s=samples / span_s,
        trainer_idle=max(0.0, 1 - report.trained_s / whole_s),
        workers_idle=max(0.0, 1 - report.generated_s / (workers * whole_s)),
        staleness=ages,
    )
