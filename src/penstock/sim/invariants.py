"""What must hold at every moment of a run, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from penstock.control import events
from penstock.control.pipeline import PipelineControl
from penstock.errors import InvalidTransition
from penstock.records.batch import Batch
from penstock.records.ids import PromptIndex, SampleId, StepIndex
from penstock.sim.fetching import Fetched
from penstock.sim.replica import Artifacts, SimEngine
from penstock.sim.rings import SimRing
from penstock.weights.replica import Replica
from penstock.wire import messages


class Watch:
    """Sees every event and answer of a run; raises InvalidTransition at the first broken promise."""

    def __init__(self, check_every: int, max_staleness: int) -> None:
        self.check_every = check_every
        self.max_staleness = max_staleness
        self.staleness: Counter[int] = Counter()
        self.checks = 0
        self._seen = 0
        self._batches: dict[StepIndex, messages.BatchReady] = {}
        self._trained: dict[StepIndex, tuple[PromptIndex, ...]] = {}
        self._trainer = ""

    def saw(self, control: PipelineControl, event: events.Event, answer: object) -> None:
        """Called after every event, with the state it left."""
        self._seen += 1
        if self.check_every and self._seen % self.check_every == 0:
            control.check()
            self.checks += 1
        if isinstance(answer, messages.BatchReady):
            self._saw_batch(answer)
        elif isinstance(answer, messages.Registered) and isinstance(event, messages.Register):
            self._saw_trainer(control, event)
        elif isinstance(event, messages.AckStep) and isinstance(answer, messages.Ok):
            given = self._batches[event.step].batch.groups
            left = tuple(group.prompt for group in given if group.prompt not in event.missing_prompts)
            self._trained[event.step] = left
            self._no_prompt_twice()

    def _saw_batch(self, given: messages.BatchReady) -> None:
        batch = given.batch
        known = self._batches.get(batch.step)
        if known is not None and known.batch != batch:
            raise InvalidTransition(f"step {batch.step} was given two different batches by the same trainer's lineage")
        if known is not None:
            return
        self._batches[batch.step] = given
        for group in batch.groups:
            for version in group.versions:
                age = batch.step - version
                self.staleness[age] += 1
                if not 0 <= age <= self.max_staleness:
                    raise InvalidTransition(f"step {batch.step} was given a sample of version {version}")

    def _saw_trainer(self, control: PipelineControl, event: messages.Register) -> None:
        if event.role != "trainer" or event.member == self._trainer:
            return
        self._trainer = event.member
        due = control.ledger.state.version
        for step in [step for step in self._batches if step >= due]:
            if step > due or step not in control.ledger.state.steps:
                del self._batches[step]
        for step in [step for step in self._trained if step >= due]:
            del self._trained[step]

    def _no_prompt_twice(self) -> None:
        latest = max(self._trained)
        for prompt in self._trained[latest]:
            for step in range(max(0, latest - 8), latest):
                if prompt in self._trained.get(StepIndex(step), ()):
                    raise InvalidTransition(f"prompt {prompt} was trained in step {step} and again in step {latest}")


class Truth:
    """What really happened in a world where weights and payloads are simulated too, beside what the machines believe.

    Raises InvalidTransition at the first sample that is made with a mixture or with weights nobody published, at the
    first that is taken for another version's, and at the first payload that turns out to be somebody else's.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        self.looks = 0
        self.payloads = 0
        self._artifacts = artifacts

    def decodes(self, engine: SimEngine, replica: Replica) -> None:
        """At every decode boundary of every batch."""
        self.looks += 1
        found = engine.memory[0]
        if engine.asleep or engine.mixed or not replica.may_serve:
            raise InvalidTransition(f"an engine with {engine.memory} generates although its replica is {replica!r}")
        if found != replica.digest or replica.version not in self._artifacts.ever.get(found, ()):
            raise InvalidTransition(f"an engine with {found!r}, never published so, generates as {replica!r}")

    def accepted(self, event: messages.Deliver, refused: Container[SampleId]) -> None:
        """Samples that the controller took."""
        for rollout in event.rollouts:
            published = self._artifacts.ever.get(rollout.weights_digest, set())
            if rollout.sample not in refused and rollout.version not in published:
                raise InvalidTransition(f"{rollout} was taken, its weights were published as versions {published}")

    def trains(self, batch: Batch, fetched: Fetched) -> None:
        """A batch with the payloads that came, at the moment they are used."""
        for group in batch.groups:
            if any(ref in fetched.missing for ref in group.payloads):
                continue
            for sample, ref in zip(group.samples, group.payloads, strict=True):
                self.payloads += 1
                if (found := fetched.sample(ref)) != sample:
                    raise InvalidTransition(f"sample {sample} was to be trained, its payload is that of {found}")


def check_slots(ring: SimRing, wanted: Container[tuple[int, int]]) -> None:
    """Every slot in use holds a payload that somebody still wants, or is about to be told to free: `wanted` names
    those by slot and generation."""
    ring.check()
    for slot, (state, generation) in ring.occupied().items():
        if (slot, generation) not in wanted:
            raise InvalidTransition(f"slot {slot} (generation {generation}, {state.name}) of {ring!r} is leaked")


def check_end(control: PipelineControl, seen: list[list[PromptIndex]]) -> None:
    """With respect to the final checkpoint: no prompt was trained twice, and none that was taken was skipped."""
    control.check()
    books = control.ledger.state
    trained = Counter(prompt for prompts in seen for prompt in prompts)
    twice = [prompt for prompt, times in trained.items() if times > 1]
    if twice:
        raise InvalidTransition(f"prompts {twice[:5]} were trained more than once")
    open_ended = len(books.redo) + sum(group.stage != "trained" for group in books.groups.values())
    accounted = len(trained) + len(books.set_aside) + books.filtered_prompts + open_ended
    if accounted != books.next_prompt:
        raise InvalidTransition(f"{books.next_prompt} prompts were issued, {accounted} are accounted for")
    if books.prompt_limit is not None and control.settings.steps is None and open_ended:
        raise InvalidTransition(f"{open_ended} prompts of the epoch were never trained")
    if len(seen) != books.version:
        raise InvalidTransition(f"the final checkpoint holds {len(seen)} steps, the ledger {books.version}")
