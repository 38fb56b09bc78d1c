"""Folds one pipeline's journal into the time of samples in each stage of the ring, and their staleness.

An event is read as it is on disk: a mapping with a `type`, and the notes of the decisions. This module does not import
the classes of the events. Only samples in flight are kept one by one; the rest is sums.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.dashboard.series import Series

STAGES: Final = {
    "wait": "waits in the worker",
    "prepare": "is prepared",
    "generate": "is generated",
    "postprocess": "is scored and postprocessed",
    "deliver": "is written and delivered",
    "group": "waits for its group",
    "buffer": "waits for a batch",
    "train": "is with the trainer",
    "publish": "new weights are published",
    "reach": "new weights reach a worker",
}
"""The stages in order: of a sample, then of the weights trained on it."""

MOST_GROUPS = 50_000
MOST_REMARKS = 500
MOST_VERSIONS = 256


class Remark(NamedTuple):
    """A message of the controller about its decisions or about a process."""

    at: float
    pipeline: str
    kind: str
    text: str


@dataclass(slots=True)
class Group:
    """The samples of one prompt that are in flight."""

    attempt: int
    leased_at: dict[int, float] = field(default_factory=dict)
    delivered_at: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    complete_at: float | None = None


class RingFold:
    """Takes a pipeline's events in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stages: dict[str, Series] = {stage: Series() for stage in STAGES}
        """Seconds, over time."""
        self.staleness: Counter[int] = Counter()
        """Number of dispatched samples by staleness: versions between generation and training."""
        self.rewards: dict[str, Series] = {name: Series() for name in ("low", "mean", "high")}
        """Over steps: the 10th percentile, the mean and the 90th percentile of each batch."""
        self.lengths = Series()
        """Over steps."""
        self.versions: deque[tuple[int, float, int]] = deque(maxlen=MOST_VERSIONS)
        """The last published: version, time, bytes."""
        self.remarks: deque[Remark] = deque(maxlen=MOST_REMARKS)
        self.step = -1
        """The last step with a batch."""
        self.resumed = 0
        self.failed = ""
        self.stalled = ""
        """The controller's last diagnosis of a stall."""
        self._groups: dict[int, Group] = {}
        self._prompt_of: dict[int, int] = {}
        self._dispatched_at: dict[int, float] = {}
        self._acked_at: dict[int, float] = {}
        self._reached: dict[str, int] = {}
        self._gathered: dict[Series, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        """Points that are not in their series yet: adding many at once costs little more than adding one."""

    def __repr__(self) -> str:
        return f"<RingFold {self.name}: {len(self._groups)} groups in flight, step {self.step}>"

    def take(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is not None:
            handler(at, event, notes)
        kind = str(event["type"])
        for line in notes.get("said", ()):
            _, stalled, diagnosis = line.partition("stalled for ")
            if stalled:
                self.stalled = diagnosis.partition(": ")[2]
            self.remarks.append(Remark(at, self.name, "stall" if stalled else kind, line))
        if "failed" in notes:
            self.failed = notes["failed"]
            self.remarks.append(Remark(at, self.name, "failure", self.failed))
        for prompt, _ in notes.get("filtered", ()):
            self._forget(prompt)

    def settle(self) -> None:
        """Moves the gathered points into their series; called after each batch of events."""
        for series, (xs, ys) in self._gathered.items():
            series.add(xs, ys)
        self._gathered.clear()

    def _gather(self, series: Series, x: float, y: float) -> None:
        xs, ys = self._gathered[series]
        xs.append(x)
        ys.append(y)

    def _spend(self, stage: str, at: float, seconds: float) -> None:
        self._gather(self.stages[stage], at, max(0.0, seconds))

    # -- prompt to payload --------------------------------------------------------------------------------------

    def _on_ask_lease(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self._serves(at, event["member"], event["version"])
        for prompt, attempt, samples in notes.get("leases", ()):
            group = self._groups.get(prompt)
            if group is None or group.attempt != attempt:
                self._forget(prompt)
                group = self._groups[prompt] = Group(attempt)
            for sample in samples:
                group.leased_at[sample] = at
                self._prompt_of[sample] = prompt
        while len(self._groups) > MOST_GROUPS:
            self._forget(next(iter(self._groups)))

    def _on_deliver(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        refused = set(notes.get("refused", ((), ""))[0])
        for rollout in event.get("rollouts", ()):
            sample = rollout["sample"]
            group = self._take_back(sample)
            if group is None or sample in refused:
                continue
            leased_at = group.leased_at.pop(sample)
            prepare_s, generate_s, postprocess_s, waited_s, *_ = rollout.get("times") or (0.0, 0.0, 0.0, 0.0)
            self._spend("wait", at, waited_s)
            self._spend("prepare", at, prepare_s)
            self._spend("generate", at, generate_s)
            self._spend("postprocess", at, postprocess_s)
            self._spend("deliver", at, at - leased_at - waited_s - prepare_s - generate_s - postprocess_s)
            group.delivered_at.append(at)
            group.rewards.append(rollout["reward"])
            group.versions.append(rollout["version"])
            group.lengths.append(rollout["length"])
            if not group.leased_at:
                group.complete_at = at
        lost = [failure["sample"] for failure in event.get("failures", ())]
        for sample in (*lost, *event.get("returned", ())):
            group = self._take_back(sample)
            if group is not None:
                del group.leased_at[sample]

    def _take_back(self, sample: int) -> Group | None:
        """Ends the lease of a sample and returns its group."""
        prompt = self._prompt_of.pop(sample, None)
        return None if prompt is None else self._groups.get(prompt)

    def _forget(self, prompt: int) -> None:
        group = self._groups.pop(prompt, None)
        for sample in group.leased_at if group is not None else ():
            self._prompt_of.pop(sample, None)

    # -- batch to weights ---------------------------------------------------------------------------------------

    def _on_ask_batch(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        if "batch" not in notes:
            return
        step = event["step"]
        if step <= self.step:
            self.settle()
            for series in (*self.rewards.values(), self.lengths):
                series.forget_from(step)
        self.step = step
        self._dispatched_at[step] = at
        groups = [group for prompt, _, _ in notes["batch"] if (group := self._groups.get(prompt)) is not None]
        for prompt, _, _ in notes["batch"]:
            self._forget(prompt)
        for group in groups:
            complete_at = group.complete_at if group.complete_at is not None else at
            self._spend("buffer", at, at - complete_at)
            for delivered_at in group.delivered_at:
                self._spend("group", complete_at, complete_at - delivered_at)
            self.staleness.update(step - version for version in group.versions)
        rewards = sorted(reward for group in groups for reward in group.rewards)
        if rewards:
            self._gather(self.rewards["low"], step, rewards[len(rewards) // 10])
            self._gather(self.rewards["mean"], step, sum(rewards) / len(rewards))
            self._gather(self.rewards["high"], step, rewards[-1 - len(rewards) // 10])
            lengths = [length for group in groups for length in group.lengths]
            self._gather(self.lengths, step, sum(lengths) / len(lengths))

    def _on_ack_step(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        dispatched_at = self._dispatched_at.pop(event["step"], None)
        if dispatched_at is not None:
            self._spend("train", at, at - dispatched_at)
        self._acked_at = {event["step"] + 1: at}

    def _on_publish_weights(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        manifest = event["manifest"]
        version = manifest["version"]
        acked_at = self._acked_at.get(version)
        if acked_at is not None:
            self._spend("publish", at, at - acked_at)
        self.versions.append((version, at, sum(bucket["size_bytes"] for bucket in manifest["buckets"])))

    def _serves(self, at: float, member: str, version: int) -> None:
        """A lease request contains the worker's version: the first with a new version gives the time of its arrival."""
        if self._reached.get(member, -1) >= version:
            return
        self._reached[member] = version
        for published, published_at, _ in reversed(self.versions):
            if published == version:
                self._spend("reach", at, at - published_at)
                break

    # -- members ------------------------------------------------------------------------------------------------

    def _on_register(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        if event["role"] == "trainer":
            self._reached.clear()  # the same version may be published again
            self._dispatched_at.clear()

    def _on_unregister(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self._reached.pop(event["member"], None)

    def _on_run_resumed(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self.resumed += 1
        self.failed = self.stalled = ""
        self._groups.clear()
        self._prompt_of.clear()
