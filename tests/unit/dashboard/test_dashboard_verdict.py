"""One look says whether the run is well: the word, the tone and the sentence."""

from __future__ import annotations

import pytest

from penstock.dashboard.verdict import Evidence, PipelineFacts, judge

FACTS = (PipelineFacts("p", steps=10),)
WELL = {"p": {"phase": "running", "workers_alive": 2, "trainer_alive": 1, "stalled_s": 0.0}}


def found(**more) -> Evidence:
    return Evidence(
        **(
            {"directory": "runs/x", "stall_after_s": 60.0, "pipelines": FACTS, "steps": {"p": 4}, "silent_s": 100.0}
            | more
        )
    )


def test_a_run_that_is_held_and_moves_is_well():
    verdict = judge(found(alive=True, gauges=WELL, silent_s=1.0))
    assert (verdict.word, verdict.tone) == ("running", "well")
    assert "step 4 of 10" in verdict.sentence


@pytest.mark.parametrize(
    ("gauge", "value", "word"),
    [("stalled_s", 99.0, "99 s"), ("workers_alive", 0, "no live worker"), ("trainer_alive", 0, "no live trainer")],
)
def test_a_live_run_in_trouble_wants_attention(gauge: str, value: float, word: str):
    verdict = judge(found(alive=True, silent_s=1.0, gauges={"p": WELL["p"] | {gauge: value}}))
    assert (verdict.word, verdict.tone) == ("running", "attention")
    assert word in verdict.sentence


def test_a_stall_is_told_with_its_diagnosis():
    stalled = {"p": WELL["p"] | {"stalled_s": 99.0}}
    verdict = judge(found(alive=True, silent_s=1.0, gauges=stalled, stalls={"p": "The trainer t waits for 2 groups."}))
    assert verdict.sentence == "p has made no progress for 99 s: The trainer t waits for 2 groups."


def test_a_live_run_that_writes_nothing_wants_attention():
    assert judge(found(alive=True)).tone == "attention"


def test_a_run_that_has_just_begun_says_so():
    assert judge(found(alive=True, steps={}, silent_s=0.5)).sentence.startswith("Starting")


def test_a_run_without_processes_and_without_an_ending_was_killed():
    verdict = judge(found(gauges=WELL))
    assert (verdict.word, verdict.tone) == ("killed", "bad")
    assert "--resume runs/x" in verdict.sentence


def test_files_that_are_just_being_written_are_of_a_run_elsewhere():
    assert judge(found(gauges=WELL, silent_s=2.0)).word == "running"


@pytest.mark.parametrize(
    ("how", "tone", "sentence"),
    [
        ("complete", "well", "Complete: p step 4 of 10."),
        ("interrupted", "attention", "Interrupted after p step 4 of 10. Resume with: penstock run --resume runs/x"),
        ("failed", "bad", "so it was"),
    ],
)
def test_a_run_that_said_how_it_ended_is_believed(how: str, tone: str, sentence: str):
    verdict = judge(found(ending={"how": how, "sentence": "so it was\nTraceback"}, silent_s=1.0))
    assert (verdict.word, verdict.tone, verdict.sentence) == (how, tone, sentence)


def test_a_resumed_run_is_running_whatever_it_said_before():
    assert judge(found(alive=True, ending={"how": "failed"}, silent_s=1.0)).word == "running"


def test_a_failure_report_is_the_sentence_of_a_run_that_failed_without_an_ending():
    verdict = judge(found(failure_reports={"p.trainer": "the disk is full\nTraceback …"}))
    assert (verdict.word, verdict.sentence) == ("failed", "p.trainer: the disk is full")
    assert judge(found(failed="nothing moved")).sentence == "nothing moved"


def test_an_older_run_is_complete_when_its_steps_are_trained():
    assert judge(found(steps={"p": 10})).word == "complete"
    assert judge(found(gauges={"p": {"phase": "complete"}})).word == "complete"


def test_an_empty_directory_is_no_failure():
    assert judge(found(steps={}, silent_s=None)).word == "empty"
