from penstock.launch.processes import ProcessSpec
from penstock.launch.restarts import (
    CRASHES_AT_START,
    FULL_DISK,
    Ended,
    FailTheRun,
    Finished,
    RestartAfter,
    RestartPolicy,
    without_place,
)
from penstock.runtime.rundir import NO_SPACE


def words(kind: str) -> dict[str, str]:
    return {"kind": kind, "message": "the model path does not exist"}


def test_a_good_exit_is_not_restarted():
    assert RestartPolicy("w", 5, 3600.0).ended(Ended(0), 1.0, None, now=0.0) == Finished()


def test_a_configuration_mistake_fails_the_run_with_the_process_own_words():
    verdict = RestartPolicy("letters.rollout.0", 5, 3600.0).ended(Ended(2), 1.0, words("ConfigError"), now=0.0)
    assert verdict == FailTheRun("letters.rollout.0: the model path does not exist", mistake=True)


def test_a_killed_process_is_restarted_with_growing_backoff():
    policy = RestartPolicy("w", 50, 3600.0)
    delays = []
    for _ in range(8):
        verdict = policy.ended(Ended(-9), 1.0, None, now=0.0)
        assert isinstance(verdict, RestartAfter)
        assert verdict.why == "killed by SIGKILL"
        delays.append(verdict.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == 10.0


def test_backoff_starts_afresh_after_a_steady_life():
    policy = RestartPolicy("w", 50, 3600.0)
    for _ in range(5):
        policy.ended(Ended(-9), 1.0, None, now=0.0)
    verdict = policy.ended(Ended(-9), 1000.0, None, now=0.0)
    assert isinstance(verdict, RestartAfter)
    assert verdict.delay_s == 0.5


def test_repeated_crashes_at_start_fail_the_run():
    policy = RestartPolicy("w", 50, 3600.0)
    for _ in range(CRASHES_AT_START):
        assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError"), now=0.0), RestartAfter)
    assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError"), now=0.0), FailTheRun)


def test_restarts_are_bounded():
    policy = RestartPolicy("w", 2, 3600.0)
    policy.ended(Ended(-9), 100.0, None, now=0.0)
    policy.ended(Ended(-9), 100.0, None, now=1800.0)
    verdict = policy.ended(Ended(-9), 100.0, None, now=3599.0)
    assert verdict == FailTheRun("w ended again after 2 restarts within 3600 s: killed by SIGKILL")


def test_restarts_outside_the_window_do_not_count():
    """A preemptible node that is lost every six hours, for a month."""
    policy = RestartPolicy("w", 10, 3600.0)
    for hour in range(0, 24 * 30, 6):
        verdict = policy.ended(Ended(-9, lost="its node was lost"), 6 * 3600.0, None, now=3600.0 * hour)
        assert isinstance(verdict, RestartAfter)


def test_without_restarts_the_first_end_fails_the_run():
    verdict = RestartPolicy("w", 0, 3600.0).ended(Ended(-9), 100.0, None, now=100.0)
    assert verdict == FailTheRun("w ended: killed by SIGKILL")


def test_a_full_disk_fails_the_run_at_once_even_without_room_for_a_failure_report():
    verdict = RestartPolicy("controller", 5, 3600.0).ended(Ended(NO_SPACE), 100.0, None, now=0.0)
    assert verdict == FailTheRun(f"controller: {FULL_DISK}")


def test_the_reason_of_a_restart_is_one_line():
    crash = {"kind": "KeyError", "message": "'letters'\nTraceback (most recent call last):\n  ..."}
    verdict = RestartPolicy("w", 5, 3600.0).ended(Ended(70), 100.0, crash, now=0.0)
    assert isinstance(verdict, RestartAfter)
    assert verdict.why == "KeyError: 'letters'"


def test_the_loss_of_a_place_is_said_and_survived():
    verdict = RestartPolicy("w", 5, 3600.0).ended(
        Ended(-9, lost="its place on node 10.0.0.2 was lost"), 100.0, None, now=0.0
    )
    assert verdict == RestartAfter(0.5, "its place on node 10.0.0.2 was lost")


def test_a_worker_without_a_place_waits_while_another_does_its_work_and_fails_the_run_otherwise():
    spec = ProcessSpec("letters.rollout.1", "rollout_worker", (), threads=1, pipeline="letters")
    assert isinstance(without_place(spec, "no CPU is free", ["letters.rollout.0"]), RestartAfter)
    assert without_place(spec, "no CPU is free", []) == FailTheRun(
        "letters.rollout.1 cannot be started: no CPU is free"
    )


def test_kills_and_evictions_are_not_failures_of_the_process_itself():
    policy = RestartPolicy("w", 50, 3600.0)
    for _ in range(2 * CRASHES_AT_START):
        assert isinstance(policy.ended(Ended(-9), 1.0, None, now=0.0), RestartAfter)
        assert isinstance(policy.ended(Ended(1), 1.0, words("Stale"), now=0.0), RestartAfter)
    assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError"), now=0.0), RestartAfter)
