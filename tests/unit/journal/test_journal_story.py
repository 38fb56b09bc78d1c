"""Stories told from journals that the real control machine filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.control import effects, events
from penstock.control.notes import encode_notes
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import EvaluationSection, PipelineSettings
from penstock.errors import ConfigError, RunFailed
from penstock.journal.story import Kind, story, story_lines
from penstock.journal.writer import Journal
from penstock.records.ids import MemberId, PipelineName, PromptIndex, RunId, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout, Score, StageTimes
from penstock.records.weights import BucketSpec, Manifest
from penstock.wire import messages

A = PipelineName("a")
W, W2, T, T2 = MemberId("w1"), MemberId("w2"), MemberId("t1"), MemberId("t2")


class Run:
    """One pipeline's machine and its journal, a second per event."""

    def __init__(self, path: Path, evaluation: EvaluationSection = EvaluationSection()) -> None:
        self.path = path
        self.journal = Journal(path, RunId("run"))
        settings = PipelineSettings(
            name=A, groups_per_step=1, group_size=2, max_staleness=1, steps=9, max_failures=3, evaluation=evaluation
        )
        self.machine = PipelineControl(settings)
        self.now = 1_700_000_000.0
        self.requests = 0

    def happen(self, event: events.Event) -> list[effects.Effect]:
        self.now += 1.0
        before = self.machine.revision
        decided = self.machine.handle(event, self.now)
        if self.machine.revision != before:
            self.journal.append(A, self.now, msgspec.msgpack.encode(event), encode_notes(decided))
        self.machine.check()
        return decided

    def register(self, member: MemberId) -> None:
        self.happen(messages.Register(A, member, "rollout"))

    def register_trainer(self, member: MemberId, step: int) -> None:
        self.happen(messages.Register(A, member, "trainer", step=StepIndex(step)))

    def lease(self, member: MemberId) -> list[SampleId]:
        self.requests += 1
        granted = self.happen(messages.AskLease(A, member, self.requests, 2, self.machine.newest))[0]
        assert isinstance(granted, messages.Leased)
        return [sample for lease in granted.leases for sample in lease.samples]

    def deliver(self, member: MemberId, samples: list[SampleId], reward: float = 0.5) -> None:
        times = StageTimes(prepare_s=0.1, generate_s=2.0, postprocess_s=0.3, waited_s=0.4)
        version = self.machine.newest
        rollouts = tuple(
            Rollout(sample, version, "", reward, 7, PayloadRef("ring", 1, sample, 1, 10, 99), times)
            for sample in samples
        )
        self.happen(messages.Deliver(A, member, rollouts=rollouts))

    def train(self, member: MemberId, step: int, missing: tuple[PromptIndex, ...] = ()) -> None:
        given = self.happen(messages.AskBatch(A, member, StepIndex(step)))[0]
        assert isinstance(given, messages.BatchReady)
        acked = messages.AckStep(
            A, member, StepIndex(step), missing, "the ring was gone" if missing else "", {"loss": 0.25}
        )
        assert isinstance(self.happen(acked)[0], messages.Ok)

    def told(self, kind: Kind, id: int) -> list[str]:
        self.journal.close(10)
        return [line.text for line in story(self.path, A, kind, id)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "journal.sqlite")
    yield run
    run.journal.close(10)


def test_a_life_without_faults(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    first, second = run.lease(W)
    run.deliver(W, [first])
    run.deliver(W, [second], reward=1.0)
    run.train(T, 0)
    run.happen(messages.AckCheckpoint(A, T, StepIndex(1)))
    assert run.told("sample", first) == [
        f"sample {first} of prompt 0, attempt 0, leased to w1, which serves version 0",
        f"sample {first} delivered by w1: reward 0.5, length 7, version 0; waited 0.400 s, prepared in 0.100 s, "
        "generated in 2.000 s, postprocessed in 0.300 s",
        "given to t1 for step 0, with 2 samples, attempt 0",
        "trained in step 0: it is part of version 1",
        "durable: the checkpoint of step 1 contains it",
    ]
    prompt = run.told("prompt", 0)
    assert prompt[0].startswith(f"samples {first}, {second} of prompt 0")
    assert sum("delivered by" in line for line in prompt) == 2
    assert run.told("step", 0) == [
        "given to t1: 2 samples of prompt 0",
        "trained by t1: version 1 exists: loss 0.25",
        "in the checkpoint of step 1: it can no longer be lost",
    ]


def test_lost_with_its_worker_and_issued_again(run: Run) -> None:
    run.register(W)
    run.register(W2)
    run.register_trainer(T, 0)
    samples = run.lease(W)
    run.happen(messages.Unregister(A, W, "killed by signal 9", died=True))
    again = run.lease(W2)
    assert set(again).isdisjoint(samples)
    run.deliver(W2, again)
    run.train(T, 0)
    life = run.told("sample", samples[0])
    assert life[1] == f"sample {samples[0]} was lost with w1: killed by signal 9"
    assert not any("trained" in line for line in life)
    prompt = run.told("prompt", 0)
    assert any("leased to w2" in line for line in prompt)
    assert any("trained in step 0" in line for line in prompt)


def test_failed_and_given_back(run: Run) -> None:
    run.register(W)
    failing, unused = run.lease(W)
    error = "Traceback (most recent call last):\n  File ...\nValueError: too hard"
    run.happen(messages.Deliver(A, W, failures=(FailedRollout(failing, "generate", error),), returned=(unused,)))
    assert f"sample {failing} failed in generate at w1: ValueError: too hard" in run.told("sample", failing)
    assert f"sample {unused} was returned unused by w1" in run.told("sample", unused)


def test_rolled_back_and_trained_again(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    samples = run.lease(W)
    run.deliver(W, samples)
    run.train(T, 0)
    run.happen(messages.Unregister(A, T, "killed", died=True))
    run.register_trainer(T2, 0)
    life = run.told("sample", samples[0])
    assert "step 0 was lost: trainer t2 starts again at step 0" in life
    assert "to be done again: trainer t2 starts at step 0" in run.told("step", 0)
    assert "lost: trainer t2 starts again at step 0" in run.told("version", 1)


def test_a_batch_outlives_its_trainer(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    samples = run.lease(W)
    run.deliver(W, samples)
    run.happen(messages.AskBatch(A, T, StepIndex(0)))
    run.happen(messages.Unregister(A, T, "killed", died=True))
    run.register_trainer(T2, 0)
    run.train(T2, 0)
    run.happen(messages.AckCheckpoint(A, T2, StepIndex(1)))
    assert run.told("sample", samples[0])[-4:] == [
        "given to t1 for step 0, with 2 samples, attempt 0",
        "given to t2 again: it starts at step 0",
        "trained in step 0: it is part of version 1",
        "durable: the checkpoint of step 1 contains it",
    ]


def test_a_batch_does_not_outlive_the_processes_of_a_run(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    samples = run.lease(W)
    run.deliver(W, samples)
    run.happen(messages.AskBatch(A, T, StepIndex(0)))
    run.happen(events.RunResumed())
    run.register_trainer(T2, 0)
    told = run.told("sample", samples[0])
    assert told[-1] == "the run was resumed: what was not trained yet is issued again"


def test_a_refused_sample_is_told_once_with_its_own_reason(run: Run) -> None:
    run.register(W)
    first, second = run.lease(W)
    payload = PayloadRef("ring", 1, 0, 1, 10, 99)
    unscored = Rollout(first, Version(0), "", 0.0, 7, payload, unscored="the judge timed out")
    broken = Rollout(second, Version(0), "", float("nan"), 7, payload)
    run.happen(messages.Deliver(A, W, rollouts=(unscored, broken)))
    run.happen(messages.Unregister(A, W, "the run is complete"))
    told = run.told("prompt", 0)
    assert "no reward (the judge timed out)" in told[1]
    assert told[2:] == [f"sample {second} from w1 was refused: sample {second} has the reward nan"]


def test_a_payload_that_could_not_be_fetched(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    samples = run.lease(W)
    run.deliver(W, samples)
    run.train(T, 0, missing=(PromptIndex(0),))
    assert "not trained in step 0: the ring was gone; the prompt is issued again" in run.told("sample", samples[0])
    assert "without prompt 0: the ring was gone" in run.told("step", 0)


def test_filtered_when_its_group_was_complete(run: Run) -> None:
    run.machine = PipelineControl(run.machine.settings, lambda rewards, lengths: "zero signal: all are 0.5")
    run.register(W)
    samples = run.lease(W)
    run.deliver(W, samples[:1])
    run.deliver(W, samples[1:])
    why = "dropped: the filter rejected its group: zero signal: all are 0.5"
    assert run.told("prompt", 0)[-1] == f"samples {samples[0]}, {samples[1]} {why}"
    assert run.told("sample", samples[1])[-1] == f"sample {samples[1]} {why}"


def test_a_version(run: Run) -> None:
    run.register(W)
    run.register_trainer(T, 0)
    manifest = Manifest(Version(0), "lin", "abc", (BucketSpec("f", 40, "d", ()), BucketSpec("g", 2, "e", ())), "w/0")
    run.happen(messages.PublishWeights(A, T, manifest))
    samples = run.lease(W)
    rollouts = tuple(Rollout(sample, Version(0), "abc", 1.0, 7, PayloadRef("r", 1, 0, 1, 10, 9)) for sample in samples)
    run.happen(messages.Deliver(A, W, rollouts=rollouts))
    run.train(T, 0)
    run.happen(messages.PublishWeights(A, T, Manifest(Version(1), "lin", "def", (), "w/1")))
    assert run.told("version", 0) == [
        "published by t1, lineage 'lin': digest abc, 42 bytes in w/0",
        f"first sample made with it by w1: sample {samples[0]}",
        "superseded by version 1; 2 samples were delivered from it so far",
    ]
    assert run.told("version", 1)[0] == "made by t1 in step 0"


def test_a_resumed_run(run: Run) -> None:
    run.register(W)
    samples = run.lease(W)
    run.deliver(W, samples[:1])
    run.happen(events.RunResumed())
    assert "the run was resumed: what was not trained yet is issued again" in run.told("sample", samples[0])


def test_times_are_told_from_the_beginning_of_the_story(run: Run) -> None:
    run.register(W)
    samples = run.lease(W)
    run.deliver(W, samples)
    run.journal.close(10)
    lines = story_lines(run.path, A, "sample", samples[0])
    assert "+    0.000 s  sample" in lines[0]
    assert "+    1.000 s  sample" in lines[1]


def test_unknown_ids_and_wrong_pipelines(run: Run) -> None:
    run.register(W)
    run.lease(W)
    run.journal.close(10)
    with pytest.raises(ConfigError, match="nothing is on record about sample 77; the highest number on record is 1"):
        story(run.path, A, "sample", 77)
    with pytest.raises(ConfigError, match="nothing is on record about sample 0"):
        story(run.path, PipelineName("b"), "sample", 0)
    with pytest.raises(ConfigError, match="nothing is on record about step 0"):
        story(run.path, A, "step", 0)


@pytest.mark.parametrize("body", [b"\x93\x01\x02\x03", b"\x81\xa1\xff\x01"], ids=["no mapping", "no text"])
def test_an_event_that_cannot_be_read_is_named(run: Run, body: bytes) -> None:
    run.journal.append(A, 0.0, body)
    run.journal.close(10)
    with pytest.raises(RunFailed, match="event 1 cannot be read"):
        story(run.path, A, "sample", 0)


def test_an_evaluation_is_part_of_the_life_of_its_version(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", EvaluationSection(every_steps=5, prompts=2))
    run.register(W)
    run.register_trainer(T, 0)
    run.happen(messages.PublishWeights(A, T, Manifest(Version(0), "l", "d", (), "weights/a")))
    scores = (Score(sample, Version(0), Version(0), "d", 0.5, 3) for sample in run.lease(W))
    run.happen(messages.Deliver(A, W, scores=tuple(scores)))
    first, _ = run.lease(W)
    told = run.told("version", 0)
    assert told[1:] == [
        "w1 began to evaluate it",
        "version 0 evaluated: reward 0.5 ± 0 over 2 samples, in 2.0 s",
    ]
    assert len(run.told("prompt", 0)) == 1, "held-out prompts have numbers of their own"
    assert run.told("sample", first)[0].startswith(f"sample {first} of prompt 0, attempt 0, leased to w1")
