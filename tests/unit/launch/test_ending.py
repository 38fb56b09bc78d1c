from penstock.launch.ending import judge, judge_failure_reports, judge_leaving
from penstock.launch.restarts import Ended, FailTheRun, Finished

TRAINERS = ("letters.trainer",)


def status(phase: str, failure: str = "", step: int = 1) -> dict[str, object]:
    books = {"prompts_issued": 10, "prompts_set_aside": 1, "dropped_filtered": 36}
    return {"failure": failure, "pipelines": {"letters": {"phase": phase, "step": step} | books}}


def test_a_run_is_over_when_its_pipelines_are_complete_and_its_trainers_have_left_well():
    assert judge(status("complete"), TRAINERS, set(TRAINERS)) == Finished()
    assert judge(status("stopped"), TRAINERS, set(TRAINERS)) == Finished()
    assert judge(status("draining"), TRAINERS, set(TRAINERS)) is None
    assert judge(status("complete"), TRAINERS, set()) is None


def test_a_run_that_ends_without_a_single_step_has_failed():
    """A filter that takes every prompt there is must not look like success; a run that was stopped early may."""
    expected = "letters: no step could be trained: of 10 prompts 36 samples were filtered and 1 prompts set aside"
    verdict = judge(status("complete", step=0), TRAINERS, set(TRAINERS))
    assert isinstance(verdict, FailTheRun)
    assert verdict.sentence.startswith(expected)
    assert judge(status("stopped", step=0), TRAINERS, set(TRAINERS)) == Finished()


def test_nothing_is_known_before_the_first_status():
    assert judge({}, TRAINERS, set()) is None


def test_a_failure_is_not_hidden_by_a_trainer_that_left_before_the_controller():
    """The pipeline fails, so its phase is stopped; the trainer hears of it and shuts down; the supervisor
    asks for the status once more before the controller has ended. This run was once reported as a good one."""
    failed = status("stopped", failure="letters: 8 prompts in a row failed")
    assert judge(failed, TRAINERS, set(TRAINERS)) == FailTheRun("controller: letters: 8 prompts in a row failed")


def test_failure_reports_at_the_end_count():
    words = {"kind": "RunFailed", "message": "no space left for the checkpoint"}
    assert judge_failure_reports({"controller": None, "letters.trainer": None}) is None
    expected = FailTheRun("letters.trainer: no space left for the checkpoint")
    assert judge_failure_reports({"controller": None, "letters.trainer": words}) == expected


def test_leaving_is_finishing_only_when_the_pipeline_is_over():
    assert judge_leaving(status("complete"), "letters", Ended(0)) == Ended(0)
    for seen in (status("draining"), {}):
        left = judge_leaving(seen, "letters", Ended(0))
        assert left.exit_code != 0
        assert "its pipeline has not ended" in left.lost
        assert judge_leaving(seen, "letters", Ended(-9)) == Ended(-9), "that speaks for itself"
