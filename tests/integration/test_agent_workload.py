"""Agents as a workload: whose fault a failed episode is, and from when its time counts."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from test_rollout_runner import NumberedStore, ScriptedController, settings, until

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Completion, Sampling
from penstock.envs.io import agents
from penstock.envs.io.agents import Agent, AgentResult
from penstock.envs.protocol import Prompt
from penstock.envs.settings import EnvSection
from penstock.errors import PeerLost, PenstockError, RunFailed, Transient
from penstock.roles.rollout_worker import _settings
from penstock.rollout.io import agent_workload
from penstock.rollout.io.agent_workload import AgentWorkload
from penstock.rollout.io.runner import Runner
from penstock.rollout.prefetch import Bounds
from penstock.rollout.settings import RolloutSection


class Engine:
    """Answers at once, or raises."""

    max_positions = None

    def __init__(self, error: PenstockError | None = None) -> None:
        self.error = error

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        if self.error is not None:
            raise self.error
        return Completion(np.array([3, 4]), np.zeros(2, np.float32), np.array([[0, 3]], np.int32), "stop", 3, "d")

    def forget(self, cache_key: object) -> None: ...

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...


def ask(base_url: str, api_key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {api_key}"}
    json = {"prompt": "ab>"}
    return httpx.post(
        f"{base_url}/completions", json=json, headers=headers, timeout=30.0, verify=False
    )  # no files read


class Player:
    """An environment whose agent is a method of the test."""

    count = None

    def __init__(self, play: Callable[[str, str, int], float], timeout_s: float = 30.0) -> None:
        self._play = play
        self.timeout_s = timeout_s

    def prompt(self, position: int) -> Prompt:
        return Prompt(text=f"agent {position}")

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        raise AssertionError("an agent returns its own reward")

    def play(self, base_url: str, api_key: str, position: int) -> AgentResult:
        return AgentResult(self._play(base_url, api_key, position))


async def generate(
    environment: Any,
    engine: Engine,
    controller: ScriptedController,
    *,
    threads: int = 8,
    bounds: Bounds = Bounds(batch_samples=2, queue_samples=8, concurrency=8),
    **options: Any,
) -> ScriptedController:
    """Generates all prompts; returns the controller, which has the results."""
    policy = build(TinyLanguageModel(alphabet="ab>", hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    section = RolloutSection(max_new_tokens=4)
    workload = AgentWorkload(environment, engine, policy.tokenizer, section, threads=threads, **options)
    runner = Runner(workload, controller, NumberedStore(), msgspec.structs.replace(settings(), bounds=bounds))
    try:
        async with asyncio.timeout(30.0):
            await runner.run()
    finally:
        workload.close()
        assert controller.settled() == list(range(2 * controller.issued))
        if workload._serving is not None:
            await workload._serving
    return controller


@pytest.mark.parametrize("error", [PeerLost("the engine has ended"), RunFailed("no such model")])
@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_lost_engine_ends_the_worker_and_fails_no_prompt(error: PenstockError, gives_up: bool) -> None:
    asked: list[int] = []

    def play(base_url: str, api_key: str, position: int) -> float:
        asked.append(ask(base_url, api_key).status_code)
        if gives_up:
            raise ValueError("the agent gives up")
        return 1.0

    controller = ScriptedController(40)
    with pytest.raises(type(error), match=str(error)):
        await generate(Player(play), Engine(error), controller)
    assert 503 in asked
    assert not controller.failures
    assert controller.issued < 40


async def test_an_episode_that_failed_for_the_engine_is_recorded_with_the_engines_error() -> None:
    def play(base_url: str, api_key: str, position: int) -> float:
        ask(base_url, api_key).raise_for_status()
        return 1.0

    controller = await generate(Player(play), Engine(Transient("the engine is full")), ScriptedController(4))
    assert {failure.error for failure in controller.failures} == {"the engine is full"}
    assert len(controller.failures) == 8


async def cancels(base_url: str, api_key: str, position: int) -> float:
    await asyncio.to_thread(ask, base_url, api_key)
    if position == 1:
        inner = asyncio.ensure_future(asyncio.sleep(60.0))
        inner.cancel()
        await inner
    return 1.0


async def test_an_agent_that_cancels_its_own_task_costs_its_episodes_alone() -> None:
    controller = await generate(Agent(function=f"{__name__}:cancels"), Engine(), ScriptedController(4))
    assert sorted(failure.sample for failure in controller.failures) == [2, 3]
    assert all("CancelledError" in failure.error for failure in controller.failures)
    assert {failure.hook for failure in controller.failures} == {"generate"}
    assert len(controller.rollouts) == 6


async def test_an_agent_that_raises_or_exits_is_named_in_the_last_line_of_its_record() -> None:
    def play(base_url: str, api_key: str, position: int) -> float:
        ask(base_url, api_key)
        if position == 1:
            raise ValueError("no luck")
        if position == 2:
            sys.exit(3)
        return float("nan") if position == 3 else 1.0

    controller = await generate(Player(play), Engine(), ScriptedController(5))
    errors = {failure.sample: failure.error.splitlines()[-1] for failure in controller.failures}
    assert [*sorted(errors)] == [2, 3, 4, 5, 6, 7]
    named = f"agent '{__name__}:Player.play', position "
    assert re.fullmatch(rf"{named}1: ValueError: no luck \(.*test_agent_workload.py:\d+\)", errors[2])
    assert errors[4].startswith(f"{named}2: RuntimeError: the agent raised SystemExit: 3")
    assert errors[6] == "its reward is nan: rewards must be finite"


async def test_the_time_of_an_agent_counts_from_its_start() -> None:
    """More samples than threads: the last ones may wait for longer than an agent may take."""
    running, ended, deadlines = threading.Semaphore(2), 0, 0

    class Counting(Player):
        @property
        def timeout_s(self) -> float:  # read when a deadline is set
            nonlocal deadlines
            deadlines += 1
            assert deadlines <= ended + 2, "the deadline of an agent that has not started"
            return 30.0

        @timeout_s.setter
        def timeout_s(self, value: float) -> None: ...

    def play(base_url: str, api_key: str, position: int) -> float:
        assert running.acquire(blocking=False), "more agents than threads"
        try:
            ask(base_url, api_key)
        finally:
            nonlocal ended
            ended += 1
            running.release()
        return 1.0

    controller = await generate(Counting(play), Engine(), ScriptedController(8), threads=2)
    assert not controller.failures
    assert (len(controller.rollouts), deadlines) == (16, 16)


hold = threading.Event()
"""Ends the calls that hang."""
hung = threading.Semaphore(0)
"""Calls that hang; a test takes as many as it wants."""


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """No grace beyond deadlines; sets how many calls hang, until the end of the test."""
    monkeypatch.setattr(agent_workload, "LATE_S", 0.0)
    hold.clear()

    def number(calls: int) -> None:
        hung.release(calls)

    yield number
    while hung.acquire(blocking=False):
        pass
    hold.set()


def hangs(base_url: str, api_key: str, position: int) -> float:
    ask(base_url, api_key)
    if hung.acquire(blocking=False):
        hold.wait(60.0)
    return 1.0


async def blocks(base_url: str, api_key: str, position: int) -> float:
    await asyncio.to_thread(ask, base_url, api_key)
    if hung.acquire(blocking=False):
        hold.wait(60.0)
    return 1.0


async def waits(base_url: str, api_key: str, position: int) -> float:
    await asyncio.to_thread(ask, base_url, api_key)
    if hung.acquire(blocking=False):
        await asyncio.sleep(60.0)
    return 1.0


async def test_agents_that_hang_cost_their_episodes_even_if_all_threads_hang(hanging: Callable[[int], None]) -> None:
    hanging(2)
    agent = Agent(function=f"{__name__}:hangs", timeout_s=2.0)
    controller = await generate(agent, Engine(), ScriptedController(6), threads=2)
    assert len(controller.failures) == 2
    assert len(controller.rollouts) == 10
    for failure in controller.failures:
        position = failure.sample // 2
        named = rf"agent '{__name__}:hangs', position {position}: did not end within 2 s, at .*\.py:\d+ hangs"
        assert re.match(named, failure.error), failure.error


async def test_an_agent_that_blocks_its_loop_costs_its_episode_alone(
    hanging: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_workload, "LATE_S", 5.0)
    monkeypatch.setattr(agents, "CANCEL_S", 0.1, raising=False)
    monkeypatch.setattr(agents, "BLOCKED_S", 0.3, raising=False)
    hanging(1)
    agent = Agent(function=f"{__name__}:blocks", timeout_s=2.0)
    controller = await generate(agent, Engine(), ScriptedController(4))
    assert len(controller.rollouts) == 7, "those on the same loop were started again"
    [failure] = controller.failures
    assert f"agent '{__name__}:blocks', position {failure.sample // 2}" in failure.error
    assert re.search(r"blocked its event loop .*, at test_agent_workload.py:\d+ blocks", failure.error)


async def test_an_agent_that_waits_for_too_long_is_cancelled_and_its_line_named(hanging: Callable[[int], None]) -> None:
    hanging(2)
    agent = Agent(function=f"{__name__}:waits", timeout_s=2.0)
    controller = await generate(agent, Engine(), ScriptedController(3))
    assert len(controller.rollouts) == 4
    for failure in controller.failures:
        assert re.search(r"did not end within 2 s, at test_agent_workload.py:\d+ waits", failure.error)


async def test_a_worker_with_too_many_threads_that_hang_ends_and_says_where(
    hanging: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_workload, "MOST_LEFT", 1)
    hanging(100)
    agent = Agent(function=f"{__name__}:hangs", timeout_s=0.2)
    controller = ScriptedController(20)
    with pytest.raises(PeerLost, match=r"2 episodes of agent '.*:hangs' hang .* position \d+, at .*\.py:\d+ hangs"):
        await generate(agent, Engine(), controller, threads=2)


async def test_what_runs_for_long_is_reported_with_its_line(
    hanging: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_workload, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(agent_workload, "REPORT_EVERY_S", 0.02)
    reported: list[str] = []
    for function in ("hangs", "waits"):
        hanging(1)
        agent = Agent(function=f"{__name__}:{function}", timeout_s=0.5)
        await generate(agent, Engine(), ScriptedController(1), progressed=reported.append)
        assert any(
            re.match(rf"agent '.*:{function}' running for 0 s, at test_agent_workload.py:\d+ {function}", line)
            for line in reported
        ), reported


async def test_an_agent_that_is_late_fails_and_its_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_workload, "LATE_S", 0.0)
    answers: list[int] = []

    def play(base_url: str, api_key: str, position: int) -> float:
        if not answers:
            while (answered := ask(base_url, api_key).status_code) == 200:
                answers.append(answered)
            answers.append(answered)
            threading.Event().wait(0.5)
        else:
            ask(base_url, api_key)
        return 1.0

    controller = await generate(Player(play, timeout_s=1.0), Engine(), ScriptedController(2), threads=1)
    assert answers[-1] == 401, "its episode has ended"
    assert ["did not end within 1 s" in failure.error for failure in controller.failures] == [True]
    assert len(controller.rollouts) == 3


async def test_a_slow_episode_holds_its_group_alone() -> None:
    """The others are delivered while it runs, also where calls of many groups are configured."""
    process: Any = SimpleNamespace(
        pipeline=SimpleNamespace(rollout=RolloutSection(group_size=2, batch_samples=32), env=EnvSection(name="agent")),
        config=SimpleNamespace(run=SimpleNamespace(grace_s=10.0)),
    )
    controller = ScriptedController(16)
    alone = threading.Event()

    def play(base_url: str, api_key: str, position: int) -> float:
        ask(base_url, api_key)
        if position == 3:
            assert alone.wait(20.0), "the others were not delivered"
        return 1.0

    environment = Player(play)
    chosen = _settings(process, environment).bounds
    assert chosen.batch_samples * chosen.concurrency == 32
    async with asyncio.TaskGroup() as group:
        group.create_task(generate(environment, Engine(), controller, threads=32, bounds=chosen))
        await until(lambda: len(controller.rollouts) == 30)
        alone.set()
    assert not controller.failures


async def test_an_episode_whose_worker_ends_is_cancelled() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Cancellable(Player):
        def cancel(self, api_key: str) -> None:
            cancelled.set()

    def play(base_url: str, api_key: str, position: int) -> float:
        begun.set()
        assert cancelled.wait(30.0)
        return 1.0

    policy = build(TinyLanguageModel(alphabet="ab>", hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    workload = AgentWorkload(Cancellable(play), Engine(), policy.tokenizer, RolloutSection(), threads=1)
    controller = ScriptedController(1)
    runner = Runner(workload, controller, NumberedStore(), settings(batch_samples=2))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run())
        assert await asyncio.to_thread(begun.wait, 30.0)
        runner.abandon("the test is over")
        await running
    workload.close()
    assert cancelled.is_set()
    assert controller.settled() == [0, 1]
    assert workload._serving is not None
    await workload._serving
