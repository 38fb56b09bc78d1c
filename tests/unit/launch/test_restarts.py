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
    assert RestartPolicy("w", 5).ended(Ended(0), 1.0, None) == Finished()


def test_a_configuration_mistake_fails_the_run_with_the_process_own_words():
    verdict = RestartPolicy("letters.rollout.0", 5).ended(Ended(2), 1.0, words("ConfigError"))
    assert verdict == FailTheRun("letters.rollout.0: the model path does not exist", mistake=True)


def test_a_killed_process_is_restarted_with_growing_backoff():
    policy = RestartPolicy("w", 50)
    delays = []
    for _ in range(8):
        verdict = policy.ended(Ended(-9), 1.0, None)
        assert isinstance(verdict, RestartAfter)
        assert verdict.why == "killed by SIGKILL"
        delays.append(verdict.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == 10.0


def test_backoff_starts_afresh_after_a_steady_life():
    policy = RestartPolicy("w", 50)
    for _ in range(5):
        policy.ended(Ended(-9), 1.0, None)
    verdict = policy.ended(Ended(-9), 1000.0, None)
    assert isinstance(verdict, RestartAfter)
    assert verdict.delay_s == 0.5


def test_repeated_crashes_at_start_fail_the_run():
    policy = RestartPolicy("w", 50)
    for _ in range(CRASHES_AT_START):
        assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError")), RestartAfter)
    assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError")), FailTheRun)


def test_restarts_are_bounded():
    policy = RestartPolicy("w", 2)
    policy.ended(Ended(-9), 100.0, None)
    policy.ended(Ended(-9), 100.0, None)
    verdict = policy.ended(Ended(-9), 100.0, None)
    assert verdict == FailTheRun("w was restarted 2 times and ended again: killed by SIGKILL")


def test_a_full_disk_fails_the_run_at_once_even_without_room_for_a_failure_report():
    verdict = RestartPolicy("controller", 5).ended(Ended(NO_SPACE), 100.0, None)
    assert verdict == FailTheRun(f"controller: {FULL_DISK}")


def test_the_reason_of_a_restart_is_one_line():
    crash = {"kind": "KeyError", "message": "'letters'\nTraceback (most recent call last):\n  ..."}
    verdict = RestartPolicy("w", 5).ended(Ended(70), 100.0, crash)
    assert isinstance(verdict, RestartAfter)
    assert verdict.why == "KeyError: 'letters'"


def test_the_loss_of_a_place_is_said_and_survived():
    verdict = RestartPolicy("w", 5).ended(Ended(-9, lost="its place on node 10.0.0.2 was lost"), 100.0, None)
    assert verdict == RestartAfter(0.5, "its place on node 10.0.0.2 was lost")


def test_a_worker_without_a_place_waits_while_another_does_its_work_and_fails_the_run_otherwise():
    spec = ProcessSpec("letters.rollout.1", "rollout_worker", (), threads=1, pipeline="letters")
    assert isinstance(without_place(spec, "no CPU is free", ["letters.rollout.0"]), RestartAfter)
    assert without_place(spec, "no CPU is free", []) == FailTheRun(
        "letters.rollout.1 cannot be started: no CPU is free"
    )


def test_kills_and_evictions_are_not_failures_of_the_process_itself():
    policy = RestartPolicy("w", 50)
    for _ in range(2 * CRASHES_AT_START):
        assert isinstance(policy.ended(Ended(-9), 1.0, None), RestartAfter)
        assert isinstance(policy.ended(Ended(1), 1.0, words("Stale")), RestartAfter)
    assert isinstance(policy.ended(Ended(70), 1.0, words("ValueError")), RestartAfter)
