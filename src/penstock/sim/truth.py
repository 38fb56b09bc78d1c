"""The actual history of a simulated run, recorded independently of the state machines, and the system's invariants.

Each invariant is checked where it could be violated, and raises InvalidTransition there, which ends the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from penstock.config.pipeline import PipelineSection
from penstock.errors import InvalidTransition
from penstock.records.batch import Batch
from penstock.wire import messages
from penstock.wire.messages import Reply, Request

MISSING_IS_LOSS = "payloads of an intact ring are missing"


def reward_of(version: int, prompt: int, member: int) -> float:
    """Reward of one evaluation sample, different for every version, prompt and member."""
    return (7919 * version + 104729 * prompt + 1299709 * member) % 15485863 / 15485863


class Truth:
    """Observes every answer of the controller, every decode boundary, every trained batch."""

    def __init__(self, pipelines: Sequence[PipelineSection], now: Callable[[], float]) -> None:
        self._max_staleness = {one.name: one.train.max_staleness for one in pipelines}
        self._evaluation = {one.name: one.evaluation for one in pipelines}
        self._now = now
        self.random = Random("engines")
        self.broken: list[str] = []
        self.points: dict[tuple[str, int], dict[str, Any]] = {}
        """Evaluations by pipeline and the version at which they were due."""
        self._noted_at: dict[tuple[str, int], float] = {}
        self.decodes_seen = 0
        self.samples_trained = 0
        self.trained_s = 0.0
        self.generated_s = 0.0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.steps_at: dict[str, list[float]] = defaultdict(list)
        """Time of the first acknowledgement of each step."""
        self._contents: dict[tuple[str, int], bytes] = {}
        self._published: dict[str, dict[int, bytes]] = defaultdict(dict)
        """By digest: the versions published with it, and the digest of their bytes by `content_of`."""
        self._batches: dict[tuple[str, int], Batch] = {}
        self._trained: dict[tuple[str, int], dict[int, list[int]]] = {}
        self._trainers: set[str] = set()
        self._acked: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.moved_at: dict[str, float] = {}
        """Time of the last granted lease, accepted delivery, acknowledged step or restart of the trainer."""
        self.stepped_at: dict[str, float] = {}
        """Time of the last acknowledged step, including repeated steps."""
        self.on_device: dict[int, str] = {}
        """The process that actually uses each device of the pool."""
        self.turns = 0
        self.may_miss = False
        """A fault may have removed payloads."""

    def violated(self, sentence: str) -> None:
        self.broken.append(f"at {self._now():.3f} s: {sentence}")
        raise InvalidTransition(sentence)

    # -- devices ----------------------------------------------------------------------------------------------------

    def occupies(self, process: str, devices: Sequence[int]) -> None:
        self.turns += 1
        for device in devices:
            other = self.on_device.setdefault(device, process)
            if other != process:
                self.violated(f"{process} moves to device {device} while {other} uses it")

    def vacates(self, process: str) -> None:
        for device in [device for device, other in self.on_device.items() if other == process]:
            del self.on_device[device]

    # -- weights ----------------------------------------------------------------------------------------------------

    def learned(self, pipeline: str, step: int, content: bytes) -> None:
        self._contents[pipeline, step] = content

    def decodes(self, version: int, digest: str, content: bytes) -> None:
        """An engine generates with these weights."""
        self.decodes_seen += 1
        published = self._published.get(digest, {})
        if version not in published:
            self.violated(f"an engine generates as version {version} with digest {digest!r}, which was never published")
        if content != published[version]:
            self.violated(f"an engine generates as version {version} with bytes that were never published")

    # -- calls ------------------------------------------------------------------------------------------------------

    def served(self, request: Request, reply: Reply) -> None:
        match request, reply:
            case messages.PublishWeights(pipeline=pipeline, manifest=manifest), messages.Ok():
                self._published[manifest.digest][manifest.version] = self._contents[pipeline, manifest.version]
            case messages.Register(role="trainer", member=member), messages.Registered() if member in self._trainers:
                pass  # repeated by the network
            case messages.Register(pipeline=pipeline, role="trainer", step=step), messages.Registered():
                self._trainers.add(request.member)
                self._trainer_began(pipeline, int(step or 0))
                if pipeline in self.moved_at:  # a restarted trainer resets the time
                    self.moved_at[pipeline] = self._now()
            case messages.AskBatch(pipeline=pipeline), messages.BatchReady(batch=batch):
                self._batch_sent(pipeline, batch)
            case messages.AskLease(pipeline=pipeline), messages.Leased(leases=leases) if leases:
                self.moved_at[pipeline] = self._now()
            case messages.AckStep(pipeline=pipeline), messages.Ok():
                self._acknowledged(pipeline, request)
            case messages.Deliver(rollouts=rollouts), messages.Delivered(refused=refused, reason=reason):
                self.moved_at[request.pipeline] = self._now()
                if refused:
                    self.refused[reason] += len(refused)
                for rollout in rollouts:
                    published = self._published.get(rollout.weights_digest, {})
                    if rollout.sample not in refused and rollout.version not in published:
                        self.violated(f"{rollout} was accepted; its weights were published as {sorted(published)}")

    def _trainer_began(self, pipeline: str, step: int) -> None:
        """A trainer that starts from an older checkpoint discards all later steps."""
        for key in [key for key in self._batches if key[0] == pipeline and key[1] >= step]:
            del self._batches[key]
        for done in [done for done in self._acked[pipeline] if done >= step]:
            del self._acked[pipeline][done]
        for key in [key for key, point in self.points.items() if key[0] == pipeline and _latest(point) > step]:
            del self.points[key]

    def _batch_sent(self, pipeline: str, batch: Batch) -> None:
        self._batches[pipeline, batch.step] = batch
        for group in batch.groups:
            for version in group.versions:
                age = batch.step - version
                if not 0 <= age <= self._max_staleness[pipeline]:
                    self.violated(f"{pipeline}: step {batch.step} received a sample of version {version}")

    def trains(self, pipeline: str, step: int, found: dict[int, list[int]]) -> None:
        """A learner trains on these samples, by prompt, according to their payloads."""
        batch = self._batches.get((pipeline, step))
        if batch is None:
            self.violated(f"{pipeline}: step {step} is trained without a batch")
        assert batch is not None
        given = {group.prompt: list(group.samples) for group in batch.groups}
        for prompt, samples in found.items():
            if sorted(given.get(prompt, ())) != sorted(samples):  # type: ignore[call-overload]
                self.violated(f"{pipeline}: step {step} trains {samples} of prompt {prompt}, its batch has {given}")
        self._trained[pipeline, step] = found
        self.samples_trained += sum(map(len, found.values()))

    def _acknowledged(self, pipeline: str, request: messages.AckStep) -> None:
        step, batch = request.step, self._batches.get((pipeline, request.step))
        if batch is None or step in self._acked[pipeline]:
            return  # an acknowledgement repeated
        self.moved_at[pipeline] = self.stepped_at[pipeline] = self._now()
        if request.missing_prompts and not self.may_miss:
            self.violated(f"{pipeline}: step {step} lacks prompts {request.missing_prompts}: {MISSING_IS_LOSS}")
        left = tuple(group.prompt for group in batch.groups if group.prompt not in request.missing_prompts)
        if sorted(left) != sorted(self._trained.get((pipeline, step), {})):
            self.violated(f"{pipeline}: step {step} is acknowledged with prompts {left}, but others were trained")
        for prompt in left:
            for before, prompts in self._acked[pipeline].items():
                if prompt in prompts:
                    self.violated(f"{pipeline}: prompt {prompt} was trained in step {before} and again in step {step}")
        self._acked[pipeline][step] = left
        for group in batch.groups:
            for version in group.versions:
                self.staleness[step - version] += 1
        times = self.steps_at[pipeline]
        if step >= len(times):
            times.append(self._now())

    # -- evaluations ------------------------------------------------------------------------------------------------

    def evaluated(self, line: dict[str, Any]) -> None:
        """The controller records an evaluation: complete, of one version, and once. A restart may repeat the line."""
        if line.get("skipped", "").startswith("training was rolled back"):
            return  # it is due again
        name, version, section = line["pipeline"], line["version"], self._evaluation[line["pipeline"]]
        point = {key: value for key, value in line.items() if key != "at"}
        if self.points.setdefault((name, line["due"]), point) != point:
            self.violated(f"{name}: the evaluation due at version {line['due']} ended twice, as {line}")
        self._noted_at[name, line["due"]] = self._now()
        if "skipped" in line:
            return
        if line["eval/count"] + line["eval/failed"] != section.prompts * section.samples:
            self.violated(f"{name}: version {version} was evaluated with {line['eval/count']} samples")
        values = [
            reward_of(version, prompt, one) for prompt in range(section.prompts) for one in range(section.samples)
        ]
        if not line["eval/failed"] and abs(line["eval/reward"] - sum(values) / len(values)) > 1e-9:
            self.violated(f"{name}: version {version} was evaluated with samples of other versions")

    def lose_points(self, after: float) -> None:
        """The journal lost all events after this time: those evaluations are repeated."""
        for key in [key for key, at in self._noted_at.items() if at > after]:
            self.points.pop(key, None)

    def check_points(self, pipeline: str, last: int) -> None:
        """Every evaluation that was due has a line with its results, or with the reason why it was skipped."""
        every = self._evaluation[pipeline].every_steps
        if not every:
            return
        recorded = {due for name, due in self.points if name == pipeline}
        recorded |= {point["version"] for (name, _), point in self.points.items() if name == pipeline}
        if missing := [version for version in (*range(0, last, every), last) if version not in recorded]:
            self.violated(f"{pipeline}: there is no line for the evaluations due at versions {missing}")

    # -- the end ----------------------------------------------------------------------------------------------------

    def check_end(self, pipeline: str, status: dict[str, Any], trained: list[tuple[int, int]]) -> None:
        """With respect to the final checkpoint: every step once, no prompt twice, none skipped."""
        steps = [step for step, _ in trained]
        twice = [prompt for prompt, times in Counter(prompt for _, prompt in trained).items() if times > 1]
        if twice:
            self.violated(f"{pipeline}: prompts {twice[:5]} are in the final checkpoint more than once")
        if steps and (steps != sorted(steps)):
            self.violated(f"{pipeline}: the final checkpoint trained steps out of order")
        done = {prompt for _, prompt in trained}
        filtered = sum(int(count) for name, count in status.items() if name.startswith("filtered_groups_"))
        issued, redo = int(status["prompts_issued"]), int(status["prompts_to_redo"])
        left = issued - len(done) - int(status["prompts_set_aside"]) - filtered
        if left < redo or (not status["in_flight"] and left != redo):
            self.violated(
                f"{pipeline}: of {issued} prompts {left} are not accounted for, {redo} are to be issued again"
            )


def _latest(point: dict[str, Any]) -> int:
    return max(point["due"], -1 if point["version"] is None else point["version"])
