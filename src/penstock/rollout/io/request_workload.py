"""Language models with a request engine: every episode runs by itself, as fast as its own turns allow."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any

from penstock.engines.requests import RequestEngine
from penstock.errors import Aborted, PeerLost, RunFailed
from penstock.rollout.episode import Episode
from penstock.rollout.hooks import Failed
from penstock.rollout.io.language_workload import Environment, LanguageHooks, PreparedPrompt, Tokenizer
from penstock.runtime.offload import Offload


class RequestWorkload(LanguageHooks[RequestEngine]):
    """The hooks with a request engine.

    `generate` has one conversation per sample in flight: nobody waits for the others of its batch before its next turn.
    Replies of the environment are made by `reply_threads` threads. An episode that raises, in the engine or in the
    environment, costs itself alone.
    """

    def __init__(
        self,
        environment: Environment,
        engine: RequestEngine,
        tokenizer: Tokenizer,
        *,
        reply_threads: int = 8,
        **options: Any,
    ) -> None:
        """`options` as for `LanguageHooks`."""
        super().__init__(environment, engine, tokenizer, **options)
        self._replies = Offload(reply_threads if self.max_turns > 1 else 0, "reply")

    async def generate(self, batch: Sequence[PreparedPrompt]) -> list[list[Episode | Failed]]:
        """Raises Aborted when the engine was interrupted; unfinished episodes are then kept, if there is a place."""
        owners = [(prepared, member) for prepared in batch for member in prepared.lease.members]
        episodes = await asyncio.to_thread(self._begin_all, owners)
        try:
            async with asyncio.TaskGroup() as group:
                talks = [
                    group.create_task(self._converse(prepared, member, episode))
                    for (prepared, member), episode in zip(owners, episodes, strict=True)
                ]
        except BaseExceptionGroup as errors:  # the engine is lost: that is one error, not one for each episode
            raise errors.exceptions[0] from errors
        results = [talk.result() for talk in talks]
        if None in results:
            await asyncio.to_thread(self._keep_finished, owners, results)
            raise Aborted("generation was interrupted; unfinished episodes go on from their kept tokens")
        done = iter(results)
        return [[made for _ in prepared.lease.members if (made := next(done)) is not None] for prepared in batch]

    async def _converse(self, prepared: PreparedPrompt, member: int, episode: Episode) -> Episode | Failed | None:
        """One episode to its end. None when it was interrupted: it is then kept already."""
        key = object() if self.max_turns > 1 else None
        try:
            # A kept episode may have been interrupted on either side of the environment's reply.
            going = episode.wants_completion or await self._goes_on(prepared, episode)
            while going:
                drawn = await self.engine.complete(episode.context(), self.missing(episode), cache_key=key)
                if not self.took(episode, drawn):
                    await asyncio.to_thread(self.keep, prepared, member, episode)
                    return None
                going = await self._goes_on(prepared, episode)
        except (PeerLost, RunFailed):
            raise
        except Exception:  # noqa: BLE001 - costs this episode, recorded with its traceback
            return Failed(traceback.format_exc())
        finally:
            if key is not None:
                self.engine.forget(key)
        return episode

    async def _goes_on(self, prepared: PreparedPrompt, episode: Episode) -> bool:
        if len(episode.completions) >= self.max_turns:
            return False
        return await self._replies.run(self.goes_on, prepared, episode)

    def _begin_all(self, owners: Sequence[tuple[PreparedPrompt, int]]) -> list[Episode]:
        return [self.begin(prepared, member) for prepared, member in owners]

    def _keep_finished(
        self, owners: Sequence[tuple[PreparedPrompt, int]], results: Sequence[Episode | Failed | None]
    ) -> None:
        """Their lease is given back with the unfinished ones of it, so they would be generated again."""
        for (prepared, member), result in zip(owners, results, strict=True):
            if isinstance(result, Episode):
                self.keep(prepared, member, result)
