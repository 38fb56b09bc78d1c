"""The history of a sample, a prompt, a step or a version, from the journal alone.

The journal does not import the stages: an event is read as it is on disk, a mapping with a `type`, with the notes of
the decisions that followed. Each kind of story is one class with one method per type of event that it uses; other
events are skipped. Works on the journal of a live run and on that of a finished one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import ConfigError, RunFailed
from penstock.journal.reader import history
from penstock.records.ids import PipelineName
from penstock.wire.codec import DAMAGED

Kind = Literal["sample", "prompt", "step", "version"]
Event = dict[str, Any]
Notes = dict[str, Any]

_decode: Callable[[bytes], dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any]).decode


class StoryLine(NamedTuple):
    """One thing that happened to the subject."""

    at: float
    text: str


def story(path: Path | str, pipeline: PipelineName, kind: Kind, id: int) -> list[StoryLine]:
    """Everything on record about one subject, in order. Raises `ConfigError` if there is nothing."""
    found = _STORIES[kind](id)
    for entry in history(path):
        if entry.pipeline != pipeline:
            continue
        try:
            event = _decode(entry.body)
            notes = _decode(entry.decided) if entry.decided else {}
        except DAMAGED as error:
            raise RunFailed(f"journal {path} is corrupt: event {entry.seq} cannot be read: {error}") from error
        method = getattr(found, f"on_{event.get('type')}", None)
        texts = method(event, notes) if method is not None else ()
        found.lines += [StoryLine(entry.at, text) for text in texts]
        found.lines += [StoryLine(entry.at, text) for text in found.on_any(event, notes)]
    if not found.lines:
        raise ConfigError(f"nothing is on record about {kind} {id}{found.highest_known()}")
    return found.lines


def story_lines(path: Path | str, pipeline: PipelineName, kind: Kind, id: int) -> list[str]:
    """The story as text: the time of day, the seconds since it began, and what happened."""
    lines = story(path, pipeline, kind, id)
    start = lines[0].at
    return [f"{_clock_time(line.at)}  +{line.at - start:9.3f} s  {line.text}" for line in lines]


def _clock_time(at: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"


class _Story:
    """State and methods of all kinds of stories."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.lines: list[StoryLine] = []
        self.highest = -1

    def on_any(self, event: Event, notes: Notes) -> Iterable[str]:
        """Called after the method for the event's type."""
        return ()

    def highest_known(self) -> str:
        return f"; the highest number on record is {self.highest}" if self.highest >= 0 else ""


class _GroupStory(_Story):
    """The history of a prompt: its groups, their samples, and how they ended. `only` limits it to one sample."""

    only: int | None = None
    """Include this sample only."""

    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.prompt: int | None = id
        self.attempt = 0
        self.holders: dict[int, str] = {}
        self.payloads: dict[tuple[Any, ...], int] = {}
        self.step: int | None = None
        self.trained = False
        self.durable = False

    def _included(self, sample: int) -> bool:
        return self.only is None or sample == self.only

    def on_ask_lease(self, event: Event, notes: Notes) -> Iterable[str]:
        for prompt, attempt, samples in notes.get("leases", ()):
            self._record(prompt, samples)
            if prompt != self.prompt:
                continue
            if self.only is not None and self.only not in samples:
                if self.lines and attempt > self.attempt:
                    self.attempt = attempt
                    yield f"its prompt {prompt} was issued again, as attempt {attempt} to {event['member']}"
                continue
            self.attempt = attempt
            self.step, self.trained, self.durable = None, False, False
            self.holders.update(dict.fromkeys(samples, event["member"]))
            who = f"sample {self.only}" if self.only is not None else _several("sample", samples)
            to = f"{event['member']}, which serves version {event['version']}"
            yield f"{who} of prompt {prompt}, attempt {attempt}, leased to {to}"

    def _record(self, prompt: int, samples: list[int]) -> None:
        self.highest = max(self.highest, prompt)

    def on_deliver(self, event: Event, notes: Notes) -> Iterable[str]:
        refused, reason = notes.get("refused", ((), ""))
        for rollout in event.get("rollouts", ()):
            sample = rollout["sample"]
            if not self._included(sample) or self.holders.pop(sample, None) is None:
                continue
            if sample in refused:
                yield f"sample {sample} from {event['member']} was refused: {reason}"
                continue
            self.payloads[tuple(rollout["payload"])] = sample
            prepare_s, generate_s, postprocess_s, waited_s, *_ = rollout.get("times") or (0, 0, 0, 0)
            unscored = rollout.get("unscored")
            reward = f"no reward ({unscored})" if unscored else f"reward {rollout['reward']:g}"
            yield (
                f"sample {sample} delivered by {event['member']}: {reward}, length "
                f"{rollout['length']}, version {rollout['version']}; waited {waited_s:.3f} s, prepared in "
                f"{prepare_s:.3f} s, generated in {generate_s:.3f} s, postprocessed in {postprocess_s:.3f} s"
            )
        for failure in event.get("failures", ()):
            sample = failure["sample"]
            if self.holders.pop(sample, None) is not None and self._included(sample):
                last = failure["error"].strip().splitlines()[-1:] or ["no message"]
                yield f"sample {sample} failed in {failure['hook']} at {event['member']}: {last[0]}"
        for sample in event.get("returned", ()):
            if self.holders.pop(sample, None) is not None and self._included(sample):
                yield f"sample {sample} was returned unused by {event['member']}"

    def on_ask_batch(self, event: Event, notes: Notes) -> Iterable[str]:
        for prompt, attempt, samples in notes.get("batch", ()):
            if prompt == self.prompt and (self.only is None or self.only in samples):
                self.step, self.trained = event["step"], False
                yield f"given to {event['member']} for step {self.step}, with {len(samples)} samples, attempt {attempt}"

    def on_ack_step(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.step is None or event["step"] != self.step or self.trained:
            return
        if self.prompt in event.get("missing_prompts", ()):
            self.step = None
            yield f"not trained in step {event['step']}: {event['missing_reason']}; the prompt is issued again"
        else:
            self.trained = True
            yield f"trained in step {self.step}: it is part of version {self.step + 1}"

    def on_ack_checkpoint(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.trained and not self.durable and self.step is not None and event["step"] > self.step:
            self.durable = True
            yield f"durable: the checkpoint of step {event['step']} contains it"

    def on_register(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.step is None or self.durable or event["role"] != "trainer" or event.get("step") is None:
            return
        if event["step"] == self.step and not self.trained:
            yield f"given to {event['member']} again: it starts at step {self.step}"
        elif event["step"] <= self.step:
            step, self.step, self.trained = self.step, None, False
            yield f"step {step} was lost: trainer {event['member']} starts again at step {event['step']}"

    def on_run_resumed(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.lines and not self.trained:
            self.holders.clear()
            self.step = None
            yield "the run was resumed: what was not trained yet is issued again"

    def on_any(self, event: Event, notes: Notes) -> Iterable[str]:
        gone = dict(notes.get("evicted", ()))
        if event["type"] == "unregister":
            gone.setdefault(event["member"], event.get("reason") or "it deregistered")
        for sample, holder in list(self.holders.items()):
            if holder in gone:
                del self.holders[sample]
                if self._included(sample):
                    yield f"sample {sample} was lost with {holder}: {gone[holder]}"
        dropped = [self.payloads.pop(tuple(ref), None) for ref in notes.get("released", ())]
        included = [sample for sample in dropped if sample is not None and self._included(sample)]
        if included:
            why = _DROPPED_BY.get(event["type"], "no reader is left")
            if self.prompt in (filtered := dict(notes.get("filtered", ()))):
                why = f"the filter rejected its group: {filtered[self.prompt]}"
            yield f"{_several('sample', included)} dropped: {why}"


class _SampleStory(_GroupStory):
    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.only = id
        self.prompt = None

    def _record(self, prompt: int, samples: list[int]) -> None:
        self.highest = max(self.highest, *samples)
        if self.only in samples:
            self.prompt = prompt


def _evaluated(notes: Notes, version: int) -> Iterable[str]:
    """The result of the evaluation of a version, or of the one that was due at it."""
    for result in notes.get("evaluations", ()):
        if result["skipped"] and version in (result["due"], result["version"]):
            yield f"the evaluation due at version {result['due']} was skipped: {result['skipped']}"
        elif result["version"] == version:
            due = f", due since version {result['due']}" if result["due"] != version else ""
            yield (
                f"version {version} evaluated{due}: reward {result['reward_mean']:.4g} ± {result['reward_stderr']:.2g} "
                f"over {result['samples']} samples, in {result['took_s']:.1f} s"
            )


class _StepStory(_Story):
    def on_any(self, event: Event, notes: Notes) -> Iterable[str]:
        return _evaluated(notes, self.id + 1)

    def on_ask_batch(self, event: Event, notes: Notes) -> Iterable[str]:
        self.highest = max(self.highest, event["step"])
        if event["step"] == self.id and "batch" in notes:
            groups = notes["batch"]
            prompts = _several("prompt", [prompt for prompt, _, _ in groups])
            yield f"given to {event['member']}: {sum(len(samples) for _, _, samples in groups)} samples of {prompts}"

    def on_ack_step(self, event: Event, notes: Notes) -> Iterable[str]:
        if event["step"] != self.id:
            return
        figures = ", ".join(f"{name} {value:g}" for name, value in sorted(event.get("metrics", {}).items()))
        yield f"trained by {event['member']}: version {self.id + 1} exists{': ' if figures else ''}{figures}"
        if event.get("missing_prompts"):
            yield f"without {_several('prompt', event['missing_prompts'])}: {event['missing_reason']}"

    def on_ack_checkpoint(self, event: Event, notes: Notes) -> Iterable[str]:
        if event["step"] == self.id + 1:
            yield f"in the checkpoint of step {event['step']}: it can no longer be lost"

    def on_register(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.lines and event["role"] == "trainer" and event.get("step") is not None and event["step"] <= self.id:
            yield f"to be done again: trainer {event['member']} starts at step {event['step']}"


class _VersionStory(_Story):
    def __init__(self, id: int) -> None:
        super().__init__(id)
        self.makers: set[str] = set()
        self.evaluators: set[str] = set()
        self.samples = 0
        self.superseded = False

    def on_any(self, event: Event, notes: Notes) -> Iterable[str]:
        return _evaluated(notes, self.id)

    def on_ask_lease(self, event: Event, notes: Notes) -> Iterable[str]:
        leases = notes.get("evaluation_leases", ())
        if leases and event["version"] == self.id and event["member"] not in self.evaluators:
            self.evaluators.add(event["member"])
            yield f"{event['member']} began to evaluate it"

    def on_ack_step(self, event: Event, notes: Notes) -> Iterable[str]:
        if event["step"] == self.id - 1:
            yield f"made by {event['member']} in step {event['step']}"

    def on_publish_weights(self, event: Event, notes: Notes) -> Iterable[str]:
        manifest = event["manifest"]
        self.highest = max(self.highest, manifest["version"])
        if manifest["version"] == self.id:
            size = sum(bucket["size_bytes"] for bucket in manifest["buckets"])
            yield (
                f"published by {event['member']}, lineage {manifest['lineage']!r}: digest {manifest['digest']}, "
                f"{size} bytes in {manifest['directory']}"
            )
        elif self.lines and manifest["version"] > self.id and not self.superseded:
            self.superseded = True
            yield f"superseded by version {manifest['version']}; {self.samples} samples were delivered from it so far"

    def on_deliver(self, event: Event, notes: Notes) -> Iterable[str]:
        refused = notes.get("refused", ((), ""))[0]
        made = [r for r in event.get("rollouts", ()) if r["version"] == self.id and r["sample"] not in refused]
        self.samples += len(made)
        if made and event["member"] not in self.makers:
            self.makers.add(event["member"])
            yield f"first sample made with it by {event['member']}: sample {made[0]['sample']}"

    def on_register(self, event: Event, notes: Notes) -> Iterable[str]:
        if self.lines and event["role"] == "trainer" and event.get("step") is not None and event["step"] < self.id:
            self.superseded = False
            yield f"lost: trainer {event['member']} starts again at step {event['step']}"


_STORIES: dict[Kind, type[_Story]] = {
    "sample": _SampleStory,
    "prompt": _GroupStory,
    "step": _StepStory,
    "version": _VersionStory,
}

_DROPPED_BY = {
    "deliver": "when its group was complete it was too old, or its prompt had failed too often",
    "ask_batch": "it had become too old for all later steps",
    "ack_step": "it had become too old for all later steps, or could not be fetched",
    "register": "the trainer restarted before the version it was generated with",
    "run_resumed": "the run was resumed and its payload was gone",
}


def _several(noun: str, numbers: Iterable[int]) -> str:
    """`samples 3 to 6, 9`: runs of consecutive numbers are joined."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(parts) if parts else 'none'}"
