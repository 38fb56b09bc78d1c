"""Agents: the environment's code requests completions from the endpoint; its requests become the sample."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock.batch.columns import reward_part_arrays
from penstock.envs.io.agents import AgentLate, AgentResult, LoopBlocked
from penstock.errors import Aborted, ConfigError, PeerLost, RunFailed
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.episode import Episode
from penstock.rollout.hooks import Failed, Finished, Outcome
from penstock.rollout.io.endpoint import Call, Endpoint
from penstock.rollout.io.hook_calls import is_cancellation
from penstock.rollout.io.language_workload import LanguageHooks, PreparedPrompt
from penstock.rollout.settings import RolloutSection
from penstock.runtime.named import described
from penstock.runtime.stacks import thread_location

LATE_S = 5.0
"""Wait for a result beyond the episode's own deadline."""
MOST_LEFT = 4
"""Threads that hang in late episodes, as a multiple of those that may run."""
REPORT_AFTER_S = 2.0
"""An episode that runs for longer is reported as the worker's activity."""
REPORT_EVERY_S = 1.0


class Played(msgspec.Struct):
    """One episode of an agent."""

    episode: Episode
    result: AgentResult

    @property
    def size_bytes(self) -> int:
        return self.episode.size_bytes


class _Playing(msgspec.Struct, eq=False):
    """One call of `play` in progress."""

    key: str
    position: int
    began: float
    thread: threading.Thread
    returned: Future[AgentResult]
    given_up: bool = False


class AgentWorkload(LanguageHooks):
    """The hooks for an environment with a method `play`, in front of a request engine.

    Each episode has a thread. One that is late fails and leaves its thread behind, since a thread cannot be stopped;
    once `MOST_LEFT` times as many hang as may run, the worker ends with PeerLost, to be replaced.
    """

    def __init__(
        self,
        environment: Any,
        engine: Any,
        tokenizer: Any,
        settings: RolloutSection,
        *,
        threads: int,
        progressed: Callable[[str], None] = lambda doing: None,
        **options: Any,
    ) -> None:
        """At most `threads` agents run concurrently. `progressed` receives what runs for longest. Other options as for
        `LanguageHooks`."""
        super().__init__(environment, engine, tokenizer, settings, **options)
        played = f"{environment.play.__module__}:{environment.play.__qualname__}"
        self._name = getattr(environment, "name", f"agent {played!r}")
        self._progressed = progressed
        self._threads = threads
        self._free_threads = asyncio.Semaphore(threads)
        self._playing: set[_Playing] = set()
        self._left: list[_Playing] = []
        """Late episodes whose threads may hang."""
        self._endpoint: Endpoint | None = None
        self._serving: asyncio.Task[None] | None = None

    def preflight(self) -> None: ...

    def prepare(self, lease: PromptLease) -> PreparedPrompt:
        return PreparedPrompt(lease, self.environment.prompt(lease.prompt), [])

    async def generate(self, batch: Sequence[PreparedPrompt]) -> list[list[Played | Failed]]:
        """Raises Aborted when the engine was interrupted: the agents are then restarted. Raises PeerLost or RunFailed
        when the engine is lost."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self.engine, self.tokenizer, self.sampling, self.chat, self.stop_strings)
            self._serving = asyncio.get_running_loop().create_task(self._serve(self._endpoint), name="agents")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._play(self._endpoint, one.lease.prompt))
                    for one in batch
                    for _ in one.lease.members
                ]
        except BaseExceptionGroup as errors:  # the engine is lost: one error, not one per episode
            raise errors.exceptions[0] from errors
        played = [task.result() for task in tasks]
        if None in played:
            raise Aborted("generation was interrupted; the agents are restarted")
        done = iter(played)
        return [[made for _ in one.lease.members if (made := next(done)) is not None] for one in batch]

    async def _serve(self, endpoint: Endpoint) -> None:
        """Serves the endpoint, and reports the episode that has run for longest, until `close`."""
        reporting = asyncio.get_running_loop().create_task(self._report(), name="report agents")
        try:
            await endpoint.run()
        finally:
            reporting.cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            oldest = min(self._playing, key=lambda playing: playing.began, default=None)
            if oldest is not None and (ran_s := time.monotonic() - oldest.began) > REPORT_AFTER_S:
                others = f", {len(self._playing)} in progress" if len(self._playing) > 1 else ""
                self._progressed(f"{self._name} running for {ran_s:.0f} s{self._location(oldest)}{others}")

    def _location(self, playing: _Playing) -> str:
        location = getattr(self.environment, "location", None)
        if location is not None:
            return location(playing.key)
        return thread_location(playing.thread.ident) if playing.thread.ident is not None else ""

    async def _play(self, endpoint: Endpoint, position: int) -> Played | Failed | None:
        count = self.environment.count
        position = position % count if count else position
        try:
            return await self._episode(endpoint, position)
        except LoopBlocked:  # by another episode, which has failed
            pass
        try:
            return await self._episode(endpoint, position)
        except LoopBlocked as error:
            return Failed(f"{self._name}, position {position}: {error}", hook="generate")

    async def _episode(self, endpoint: Endpoint, position: int) -> Played | Failed | None:
        key, recorded = endpoint.open()
        try:
            result = await self._result(endpoint.base_url, key, position)
            # The agent may have continued after a refused request.
            if recorded.lost is not None:
                raise recorded.lost
            if recorded.interrupted:
                return None
            if recorded.failure:
                return Failed(recorded.failure, hook="generate")
            calls = [call for call in recorded.calls if not result.session or call.session == result.session]
            return Played(episode_of(calls), result)
        except (PeerLost, RunFailed, LoopBlocked):
            raise
        except (Exception, asyncio.CancelledError) as error:  # fails this episode, recorded with its traceback
            if is_cancellation(error):
                raise
            if recorded.lost is not None:
                raise recorded.lost from None
            if recorded.interrupted:
                return None
            if recorded.failure:
                return Failed(recorded.failure, hook="generate")
            late = isinstance(error, AgentLate)
            sentence = f"{self._name}, position {position}: {error if late else described(error)}"
            return Failed(sentence if late else traceback.format_exc() + sentence, hook="generate")
        finally:
            endpoint.finish(key)

    async def _result(self, base_url: str, key: str, position: int) -> AgentResult:
        """Waits for a free thread, then for the agent, until its deadline."""
        environment: Any = self.environment
        self._left = [playing for playing in self._left if not playing.returned.done()]
        if len(self._left) >= MOST_LEFT * self._threads:
            raise PeerLost(
                f"{len(self._left)} episodes of {self._name} hang in threads, which cannot be stopped, the last one at "
                f"position {self._left[-1].position}{self._location(self._left[-1])}: the worker is replaced"
            )
        async with self._free_threads:
            playing = self._start(base_url, key, position)
            self._playing.add(playing)
            deadline = asyncio.timeout(environment.timeout_s + LATE_S)
            try:
                async with deadline:
                    return await asyncio.wrap_future(playing.returned)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                stands = self._location(playing)
                raise AgentLate(f"did not end within {environment.timeout_s:g} s{stands}") from error
            finally:
                self._playing.discard(playing)
                if not playing.returned.done():
                    playing.given_up = True
                    self._left.append(playing)
                    getattr(environment, "cancel", lambda key: None)(key)

    def _start(self, base_url: str, key: str, position: int) -> _Playing:
        environment: Any = self.environment
        returned: Future[AgentResult] = Future()
        returned.set_running_or_notify_cancel()  # it cannot be cancelled

        def play() -> None:
            if playing.given_up:
                return returned.set_exception(Aborted("the episode ended before it was started"))
            try:
                result = environment.play(base_url, key, position)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised where the result is awaited
                returned.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - an exit that the agent requested would end the worker
                returned.set_exception(RuntimeError(f"the agent raised {type(error).__name__}: {error}"))
            else:
                returned.set_result(result)

        def start() -> None:
            try:
                thread.start()
            except RuntimeError as error:  # the system allows no more threads
                returned.set_exception(error)

        thread = threading.Thread(target=play, name=f"agent {position}", daemon=True)
        playing = _Playing(key, position, time.monotonic(), thread, returned)
        # Starting a thread waits for it, and it waits for the GIL while others start their programs.
        asyncio.get_running_loop().run_in_executor(None, start)
        return playing

    def postprocess(self, prepared: PreparedPrompt, generated: Sequence[Any]) -> list[Outcome]:
        return [self._finished(made) if isinstance(made, Played) else made for made in generated]

    def _finished(self, played: Played) -> Finished:
        episode = played.episode
        assert episode.version is not None
        return Finished(
            arrays=episode.arrays() | reward_part_arrays(played.result.parts),
            reward=played.result.reward,
            version=Version(episode.version),
            weights_digest=episode.digest,
            length=episode.generated_tokens,
        )

    def close(self) -> None:
        super().close()
        if self._endpoint is not None:
            self._endpoint.close()
        getattr(self.environment, "close", lambda: None)()


def episode_of(calls: Sequence[Call]) -> Episode:
    """The calls of one agent as one sample, with a branch for every conversation that diverged."""
    if not calls:
        raise ConfigError("the agent requested no completion, so there is nothing to train")
    shared = 0
    shortest = min(len(call.context) for call in calls)
    first = calls[0].context
    while shared < shortest and all(call.context[shared] == first[shared] for call in calls):
        shared += 1
    if not shared:
        raise ConfigError("the agent's calls share no prefix of tokens: one sample cannot hold them")
    episode = Episode.start(first[:shared])
    for call in calls:
        episode.set_context(call.context)
        drawn = call.drawn
        episode.generated(drawn.token_ids, drawn.logprobs, drawn.versions, drawn.version, drawn.digest)
        episode.finish_turn("", drawn.ending)
    return episode
