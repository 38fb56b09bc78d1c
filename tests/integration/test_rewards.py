"""Reward functions that take time, raise, or hang: groups side by side, deadlines that hold, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from reward_functions import WAIT_S, picky, picky_rubric

from penstock.envs.rewards import Rubric, Scored
from penstock.envs.settings import RewardSection
from penstock.errors import RunFailed
from penstock.rollout.episode import Episode
from penstock.rollout.hooks import Failed, Finished
from penstock.rollout.io import scoring as scoring_module
from penstock.rollout.io.language_workload import outcomes_of
from penstock.rollout.io.scoring import Scoring, _Child


def score(scoring: Scoring, *groups: Sequence[str]) -> list[list[Scored]]:
    pending = [scoring.score(["p"] * len(group), group, {}) for group in groups]
    return [one.result(WAIT_S) if isinstance(one, Future) else one for one in pending]


TOGETHER = 8
"""Groups that are inside the function at once, or none returns."""


@pytest.mark.parametrize("awaits", [False, True])
def test_groups_are_scored_side_by_side(awaits: bool) -> None:
    meeting, waiting = threading.Barrier(TOGETHER), asyncio.Barrier(TOGETHER)

    def lengths(completions: Sequence[str]) -> list[float]:
        meeting.wait(WAIT_S)
        return [float(len(completion)) for completion in completions]

    async def awaited_lengths(completions: Sequence[str]) -> list[float]:
        async with asyncio.timeout(WAIT_S):
            await waiting.wait()
        return [float(len(completion)) for completion in completions]

    function = awaited_lengths if awaits else lengths
    scoring = Scoring(Rubric([function]))
    scored = score(scoring, *[["a", "bb"]] * 4 * TOGETHER)
    assert [[one.reward for one in group] for group in scored] == [[1.0, 2.0]] * 4 * TOGETHER
    assert scored[0][1].parts == {function.__name__: 2.0}
    scoring.close()


def test_at_most_so_many_calls_are_in_flight() -> None:
    counted = {"now": 0, "most": 0}

    async def count(prompts: Any, completions: Sequence[str]) -> list[float]:
        counted["now"] += 1
        counted["most"] = max(counted["most"], counted["now"])
        await asyncio.sleep(0.01)
        counted["now"] -= 1
        return [0.0] * len(completions)

    scoring = Scoring(Rubric([count]), RewardSection(reward_concurrency=3))
    score(scoring, *[["a"]] * 20)
    assert counted["most"] == 3
    scoring.close()


def test_a_batched_function_is_called_for_all_groups_that_wait() -> None:
    sizes: list[int] = []

    def whole(prompts: Any, completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        sizes.append(len(completions))
        time.sleep(0.1)
        return [float(len(completion)) for completion in completions]

    whole.batched = True  # type: ignore[attr-defined]
    scoring = Scoring(Rubric([whole]))
    scored = score(scoring, *[["a" * size] * 2 for size in range(1, 11)])
    assert [group[1].reward for group in scored] == [float(size) for size in range(1, 11)]
    assert sum(sizes) == 20
    assert len(sizes) < 10
    scoring.close()


def test_what_raises_costs_its_sample_and_may_be_given_a_reward() -> None:
    [scored] = score(Scoring(Rubric([picky]), all_inline=True), ["a", "raise", "none"])
    assert [one.reward for one in scored] == [1.0, None, None]
    assert [bool(one.error) for one in scored] == [False, True, False]
    assert scored[1].error.startswith("reward function 'picky' raised ValueError: cannot be judged (")
    settings = RewardSection(reward_on_error=-1.0)
    [scored] = score(Scoring(Rubric([picky]), settings, all_inline=True), ["a", "raise", "none"])
    assert [one.reward for one in scored] == [1.0, -1.0, -1.0]


def test_a_broken_function_fails_the_run_wherever_it_runs() -> None:
    scoring = Scoring(Rubric([lambda prompts, completions: ["x"]]))
    with pytest.raises(RunFailed, match="must return numbers"):
        score(scoring, ["a"])
    scoring.close()


@pytest.mark.slow
def test_a_hanging_thread_is_left_behind_and_the_function_moves_into_processes() -> None:
    told: list[str] = []
    settings = RewardSection(reward_timeout_s=3.0)
    scoring = Scoring(Rubric([picky]), settings, elsewhere=(picky_rubric, ()), progressed=told.append)
    [hung, fine] = score(scoring, ["hang", "a"], ["a"])
    assert [one.error for one in hung] == ["reward function 'picky' did not answer within 3 s"] * 2
    assert fine[0].reward == 1.0
    assert any(re.match(r"reward picky running for \d+ s, .*reward_functions.py:\d+ picky", line) for line in told)
    # From here on a call that hangs is stopped for real: its process is killed, the next call has another.
    [hung, raised, fine, gone] = score(scoring, ["hang"], ["raise", "a"], ["a"], ["exit"])
    assert "did not answer" in hung[0].error
    assert "raised ValueError" in raised[0].error
    assert (raised[1].reward, fine[0].reward) == (1.0, 1.0)
    assert "exit code 3" in gone[0].error
    scoring.close()
    deadline = time.monotonic() + WAIT_S
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_process_that_two_threads_kill_at_once_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker closes its rewards while the thread of a call gives up on the process."""
    child = _Child(picky_rubric, ())
    closing = child._pipe.close
    inside = threading.Semaphore(1)

    def slowly() -> None:
        assert inside.acquire(blocking=False), "the file is being closed already"
        time.sleep(0.3)
        closing()
        inside.release()

    monkeypatch.setattr(child._pipe, "close", slowly)
    with ThreadPoolExecutor(2) as threads:
        for killed in [threads.submit(child.kill) for _ in range(2)]:
            killed.result(WAIT_S)
    assert not child.alive


def test_threads_that_cannot_be_replaced_end_the_run_when_none_is_left() -> None:
    scoring = Scoring(Rubric([picky]), RewardSection(reward_timeout_s=0.5, reward_concurrency=2, reward_processes=0))
    [first] = score(scoring, ["hang"])
    assert "did not answer" in first[0].error
    with pytest.raises(RunFailed, match="reward_processes"):
        score(scoring, ["hang"])
    scoring.close()


def test_calls_that_were_late_but_returned_do_not_end_the_run() -> None:
    def late(prompts: Any, completions: Sequence[str]) -> list[float]:
        assert may_return.wait(WAIT_S)
        return [1.0] * len(completions)

    may_return = threading.Event()
    scoring = Scoring(Rubric([late]), RewardSection(reward_timeout_s=0.2, reward_concurrency=2, reward_processes=0))
    for _ in range(3):
        may_return.clear()
        [scored] = score(scoring, ["a"])
        assert "did not answer" in scored[0].error
        may_return.set()
        wait_until(lambda: not scoring._abandoned)
    [scored] = score(scoring, ["a"])
    assert scored[0].reward == 1.0
    scoring.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def test_a_process_that_cannot_be_started_costs_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = _Child.__init__
    failures = iter([OSError(errno.EMFILE, "Too many open files")])

    def start(child: _Child, *arguments: Any) -> None:
        for failure in failures:
            raise failure
        starting(child, *arguments)

    monkeypatch.setattr(_Child, "__init__", start)
    scoring = Scoring(Rubric([picky]), RewardSection(reward_processes=1), elsewhere=(picky_rubric, ()))
    [failed] = score(scoring, ["a"])
    assert failed[0].error.startswith("a process for reward functions could not be started: Too many open files")
    [fine] = score(scoring, ["a"])
    assert fine[0].reward == 1.0
    scoring.close()


def test_an_async_function_that_blocks_its_loop_has_a_deadline_and_others_a_new_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring_module, "BLOCKED_S", 0.2)
    may_return, called = threading.Event(), threading.Event()

    async def blocking(prompts: Any, completions: Sequence[str]) -> list[float]:
        called.set()
        if completions[0] == "block":
            may_return.wait(WAIT_S)
        return [1.0] * len(completions)

    scoring = Scoring(Rubric([blocking]), RewardSection(reward_timeout_s=0.5, reward_concurrency=1))
    blocked = scoring.score(["p"], ["block"], {})
    assert called.wait(WAIT_S)
    lost = scoring._loop
    [waited] = score(scoring, ["a"])  # begins on the next loop
    assert waited[0].reward == 1.0
    assert isinstance(blocked, Future)
    assert "did not answer within 0.5 s" in blocked.result(WAIT_S)[0].error
    assert re.search(r"blocked its event loop for over .* s, at test_rewards.py:\d+ blocking", caplog.text)
    assert lost is not None
    may_return.set()
    wait_until(lost.is_closed)
    [fine] = score(scoring, ["a"])
    assert fine[0].reward == 1.0
    scoring.close()


def episode() -> Episode:
    made = Episode.start([1, 2])
    made.generated(np.array([3]), np.array([-1.0]), np.array([[0, 4]]), 4, "four")
    made.finish_turn("a", "length")
    return made


def test_a_sample_without_a_reward_is_left_out_of_its_group() -> None:
    scored = [Scored(1.0, {"f": 1.0}), Scored(None, {}, "too late"), Scored(0.0, {"f": 0.0})]
    outcomes = outcomes_of([episode(), Failed("broke"), episode(), episode()], scored)
    assert outcomes[1] == Failed("broke")
    first, second, third = (outcomes[index] for index in (0, 2, 3))
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert isinstance(third, Finished)
    assert (first.reward, second.reward, third.reward) == (1.0, 0.5, 0.0)
    assert (first.unscored, second.unscored) == ("", "too late")
    assert second.arrays["unscored"].tolist() == [1]
    assert first.arrays["reward_parts.f"].tolist() == [1.0]
    assert "unscored" not in first.arrays


def test_a_group_without_any_reward_failed() -> None:
    assert outcomes_of([episode()], [Scored(None, {}, "too late")]) == [Failed("too late")]
    [never] = outcomes_of([episode()], [Scored(None, {"f": None})])
    assert never == Failed("no reward function applies to this completion", poison=True)
