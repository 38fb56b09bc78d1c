"""Agents: the environment's code requests completions from the endpoint; its requests become the sample."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.batch.columns import reward_part_arrays
from penstock.envs.io.agents import AgentResult
from penstock.errors import Aborted, ConfigError
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.episode import Episode
from penstock.rollout.hooks import Failed, Finished, Outcome
from penstock.rollout.io.endpoint import Call, Endpoint
from penstock.rollout.io.hook_calls import is_cancellation
from penstock.rollout.io.language_workload import LanguageHooks, PreparedPrompt
from penstock.rollout.settings import RolloutSection
from penstock.runtime.offload import Offload

LATE_S = 5.0
"""Wait for a result beyond the episode's own deadline."""


class Played(msgspec.Struct):
    """One episode of an agent."""

    episode: Episode
    result: AgentResult

    @property
    def size_bytes(self) -> int:
        return self.episode.size_bytes


class AgentWorkload(LanguageHooks):
    """The hooks for an environment with a method `play`, in front of a request engine."""

    def __init__(
        self, environment: Any, engine: Any, tokenizer: Any, settings: RolloutSection, *, threads: int, **options: Any
    ) -> None:
        """At most `threads` agents run concurrently. Other options as for `LanguageHooks`."""
        super().__init__(environment, engine, tokenizer, settings, **options)
        self._threads = Offload(threads, "agent")
        self._free_threads = asyncio.Semaphore(threads)
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
            self._serving = asyncio.get_running_loop().create_task(self._endpoint.run(), name="endpoint for agents")
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

    async def _play(self, endpoint: Endpoint, position: int) -> Played | Failed | None:
        key, recorded = endpoint.open()
        try:
            result = await self._result(endpoint.base_url, key, position)
            # The agent may have continued after a refused request.
            if recorded.lost is not None:
                raise recorded.lost
            if recorded.interrupted:
                return None
            if recorded.failure:
                return Failed(recorded.failure)
            calls = [call for call in recorded.calls if not result.session or call.session == result.session]
            return Played(episode_of(calls), result)
        except (Exception, asyncio.CancelledError) as error:  # fails this episode, recorded with its traceback
            if is_cancellation(error):
                raise
            if recorded.lost is not None:
                raise recorded.lost from None
            return None if recorded.interrupted else Failed(recorded.failure or traceback.format_exc())
        finally:
            endpoint.finish(key)

    async def _result(self, base_url: str, key: str, position: int) -> AgentResult:
        """Waits for a free thread, then for the agent. One that is late keeps its thread until it returns."""
        environment: Any = self.environment
        count, loop = environment.count, asyncio.get_running_loop()
        await self._free_threads.acquire()
        play = self._threads.submit(environment.play, base_url, key, position % count if count else position)
        play.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._free_threads.release))
        async with asyncio.timeout(environment.timeout_s + LATE_S):
            return await asyncio.wrap_future(play)

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
