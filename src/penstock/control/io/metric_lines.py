"""Lines that the controller writes to `metrics.jsonl`: per step, per evaluation, and gauges every few seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.control.evaluation_state import EvaluationResult
from penstock.control.pipeline import PipelineControl
from penstock.control.state import StepSummary
from penstock.records.ids import PipelineName, SampleId
from penstock.runtime.clock import Clock
from penstock.runtime.metrics import JsonLines
from penstock.wire.messages import AckStep, Deliver

EVERY_S = 2.0
BIASED = 0.02
"""A difference between the mean lengths of trained and of generated samples that is shown."""
BIAS_STEPS = 32
"""Steps over which it is measured."""
STAGES = {
    "lease_s": "lease_s",
    "prepare_s": "prepare_s",
    "queue_s": "waited_s",
    "generate_s": "generate_s",
    "score_s": "postprocess_s",
    "deliver_s": "deliver_s",
}
"""Stages of a worker: metric name to field of `StageTimes`."""
TRAINER_STAGES = ("wait_s", "fetch_s", "turn_s", "step_s", "publish_s")
"""Stages of a step, as reported by the trainer."""


class MetricLines:
    """Writes one line each time a step is trained, even if it is acknowledged several times."""

    def __init__(self, lines: JsonLines, clock: Clock) -> None:
        self._lines = lines
        self._clock = clock
        self._written: dict[PipelineName, StepSummary] = {}
        """The summary of the last line. A step that is trained again has another summary."""
        self._dropped: dict[PipelineName, tuple[int, int]] = {}
        """`dropped_finished` and `dropped_length` of the ledger at the last line."""
        self._refused: dict[PipelineName, list[int]] = {}
        """Lengths of samples that were refused since the last line."""
        self._stage_sums: dict[PipelineName, _StageSums] = {}
        self._lengths: dict[PipelineName, deque[Lengths]] = {}
        self.stages: dict[PipelineName, dict[str, float]] = {}
        """Seconds of each stage in the newest line of a step."""

    def complete(self, pipelines: Mapping[PipelineName, PipelineControl], on_file: Iterable[bytes]) -> None:
        """Writes the lines of recent steps and evaluations that are not in the file."""
        found = entries_in(on_file)
        for name, machine in pipelines.items():
            table = machine.state.ledger
            self._dropped[name] = (table.dropped_finished, table.dropped_length)
            for summary in machine.state.recent:
                if (name, "step", summary.step) not in found:
                    self._write_summary(machine, summary, {})
            for result in machine.state.evaluation.results:
                if (name, "evaluation", result.due) not in found:
                    self.write_evaluation(name, result)

    def write_step(self, request: AckStep, machine: PipelineControl) -> None:
        name = request.pipeline
        summary = next((step for step in reversed(machine.state.recent) if step.step == request.step), None)
        if summary is None or self._written.get(name) is summary:
            return
        self._written[name] = summary
        self._write_summary(machine, summary, request.metrics)

    def note_delivery(self, request: Deliver, refused: Collection[SampleId], oldest_allowed: int) -> None:
        """Adds the stage times of these samples, and the lengths of those `refused` as too old, to the next step's
        line. Samples refused for another reason (wrong weights, a reward that is not finite) are not outdated."""
        self._stage_sums.setdefault(request.pipeline, _StageSums()).add(request)
        late = [one.length for one in request.rollouts if one.sample in refused and one.version < oldest_allowed]
        self._refused.setdefault(request.pipeline, []).extend(late)

    def _stages_since(self, name: PipelineName, metrics: Mapping[str, float]) -> dict[str, float]:
        """Means over the samples delivered since the previous line; without samples, the values of that line."""
        sums = self._stage_sums.pop(name, None)
        workers = self.stages.get(name, dict.fromkeys(STAGES, 0.0)) if sums is None else sums.means()
        stages = {metric: workers[metric] for metric in STAGES}
        self.stages[name] = stages | {metric: metrics[metric] for metric in TRAINER_STAGES if metric in metrics}
        return stages

    def biased(self) -> dict[PipelineName, str]:
        """Pipelines whose trained samples differ in length from the generated ones, and by how much."""
        found = {name: sum(recent, Lengths()).bias() for name, recent in self._lengths.items()}
        return {name: f"{bias} (last {BIAS_STEPS} steps)" for name, bias in found.items() if bias}

    def _write_summary(self, machine: PipelineControl, summary: StepSummary, metrics: Mapping[str, float]) -> None:
        name = machine.settings.name
        dropped, dropped_length = self._dropped_since(machine)
        lengths = Lengths(summary.samples, summary.samples * summary.length_mean, dropped, dropped_length)
        self._lengths.setdefault(name, deque(maxlen=BIAS_STEPS)).append(lengths)
        self._lines.write(
            {
                "kind": "step",
                "at": self._clock.now(),
                "pipeline": name,
                "step": summary.step,
                "reward": summary.reward_mean if summary.samples else None,
                "samples": summary.samples,
                "staleness_mean": summary.staleness_mean,
                "staleness_max": summary.staleness_max,
                "dropped": dropped,
                **({"dropped_length_mean": dropped_length / dropped} if dropped > 0 else {}),
                "generated_length_mean": lengths.generated,
                **self._stages_since(name, metrics),
                **metrics,
            }
        )

    def _dropped_since(self, machine: PipelineControl) -> tuple[int, int]:
        """Number and total length of the finished samples since the previous line that were too old to be trained: they
        arrived too late, or waited too long for the rest of their group."""
        name, table = machine.settings.name, machine.state.ledger
        count, length = self._dropped.get(name, (0, 0))
        self._dropped[name] = (table.dropped_finished, table.dropped_length)
        late = self._refused.pop(name, [])
        return table.dropped_finished - count + len(late), table.dropped_length - length + sum(late)

    def write_evaluation(self, name: PipelineName, result: EvaluationResult) -> None:
        line = {"kind": "evaluation", "at": self._clock.now(), "pipeline": name, "due": result.due}
        line |= {"version": result.version, "took_s": result.took_s}
        if result.skipped:
            self._lines.write(line | {"skipped": result.skipped})
            return
        figures = {
            "eval/reward": result.reward_mean,
            "eval/reward_stderr": result.reward_stderr,
            "eval/count": result.samples,
            "eval/failed": result.failed,
            "eval/length": result.length_mean,
        }
        self._lines.write(line | figures)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers and total lengths of trained samples, and of finished ones that were too old to be trained."""

    trained: int = 0
    trained_length: float = 0.0
    dropped: int = 0
    dropped_length: float = 0.0

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(
            self.trained + other.trained,
            self.trained_length + other.trained_length,
            self.dropped + other.dropped,
            self.dropped_length + other.dropped_length,
        )

    @property
    def generated(self) -> float:
        """The mean length of all of them."""
        return (self.trained_length + self.dropped_length) / max(1, self.trained + self.dropped)

    def bias(self) -> str:
        """How trained samples differ in length from generated ones; empty if by no more than `BIASED`."""
        if not self.trained or not self.generated:
            return ""
        difference = self.trained_length / self.trained / self.generated - 1
        if abs(difference) <= BIASED:
            return ""
        share = self.dropped / (self.trained + self.dropped)
        than = "shorter" if difference < 0 else "longer"
        return (
            f"trained samples are {abs(difference):.1%} {than} than generated ones, of which {share:.0%} were dropped "
            "as outdated: raise train.straggler_wait_s or train.max_staleness"
        )


class _StageSums:
    """Sums of the stage times of samples."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums = dict.fromkeys(STAGES, 0.0)

    def add(self, request: Deliver) -> None:
        self._samples += len(request.rollouts)
        for rollout in request.rollouts:
            for metric, field in STAGES.items():
                self._sums[metric] += getattr(rollout.times, field)

    def means(self) -> dict[str, float]:
        return {metric: total / max(1, self._samples) for metric, total in self._sums.items()}


async def write_gauges(status: Callable[[], Mapping[str, Any]], lines: JsonLines) -> None:
    """Writes one line every few seconds until cancelled, and a last one then with the final status."""
    try:
        while True:
            lines.write(gauges_of(status()))
            await asyncio.sleep(EVERY_S)
    finally:
        lines.write(gauges_of(status()))


def gauges_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """The gauges of each pipeline and each process, separate from the lines of steps."""
    controller = {f"loop_lag_{name}": value for name, value in status["lag"].items()}
    return {
        "kind": "gauges",
        "at": status["at"],
        "pipelines": {name: _rounded(values) for name, values in status["pipelines"].items()},
        "processes": {
            name: _rounded(values) for name, values in ({"controller": controller} | status["members"]).items()
        },
    }


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds to microseconds, to save bytes."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def entries_in(lines: Iterable[bytes]) -> set[tuple[str, str, int]]:
    """The steps and evaluations that have a line, by pipeline and kind; a torn last line is ignored."""
    found: set[tuple[str, str, int]] = set()
    for line in lines:
        if b'"kind":"step"' not in line and b'"kind":"evaluation"' not in line:
            continue
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if entry.get("kind") == "step":
            found.add((entry["pipeline"], "step", entry["step"]))
        elif entry.get("kind") == "evaluation":
            found.add((entry["pipeline"], "evaluation", entry["due"]))
    return found
