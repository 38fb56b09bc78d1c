"""Language models: tokenise the prompt, sample completions, get the environment's replies, score.

A single completion is the special case of an environment that never replies. `LanguageHooks` has the hooks that do not
wait; `LanguageWorkload` adds `generate`, in which every episode runs independently of the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from penstock.batch.columns import UNSCORED, reward_part_arrays
from penstock.engines.requests import Completion, RequestEngine, Sampling
from penstock.engines.tokenizer import Tokenizer
from penstock.envs.chat import Chat, ChatMessage
from penstock.envs.protocol import Message, Prompt, TextEnvironment
from penstock.envs.rewards import Rubric, Scored
from penstock.envs.tools import tool_schema
from penstock.errors import Aborted, ConfigError, PeerLost, RunFailed
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.completions import cut_at
from penstock.rollout.episode import Episode
from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable
from penstock.rollout.io.hook_calls import is_cancellation
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.scoring import Scoring
from penstock.rollout.settings import RolloutSection
from penstock.runtime.named import takes
from penstock.runtime.offload import Offload

log = logging.getLogger(__name__)


class PreparedPrompt(msgspec.Struct):
    """A prompt ready for the engine."""

    lease: PromptLease
    prompt: Prompt
    token_ids: list[int]

    @property
    def size_bytes(self) -> int:
        return 8 * len(self.token_ids)


class LanguageHooks:
    """One episode per sample: a completion, or up to `max_turns` completions with the environment's replies between."""

    def __init__(
        self,
        environment: TextEnvironment,
        engine: RequestEngine,
        tokenizer: Tokenizer,
        settings: RolloutSection = RolloutSection(),
        *,
        greedy: bool = False,
        kept: KeptEpisodes | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        """`scoring` computes the rewards; without it, `postprocess` calls the environment's `score` inline."""
        self.environment = environment
        self.scoring = scoring or Scoring(Rubric([environment.score]), all_inline=True)
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat = chat_of(tokenizer, environment)
        self.stop_strings = tuple(settings.stop_strings)
        self.sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            stop_ids=tuple(dict.fromkeys([*tokenizer.stop_ids, *settings.stop_ids, *self._turn_end_ids()])),
            greedy=greedy,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        functions = self.scoring.rubric.functions
        self._passes_conversations = any(takes(function, "conversations") for function in functions)
        self._passes_ids = any(takes(function, "completion_ids") for function in functions)
        self.max_turns = settings.max_turns if hasattr(environment, "reply") else 1
        self.kept = kept

    def preflight(self) -> None:
        """Checks that the model can read the first prompt."""
        read = self._read(0)
        if isinstance(read, Unusable):
            raise ConfigError(f"the first prompt of the environment cannot be used: {read.reason}")

    def prepare(self, lease: PromptLease) -> PreparedPrompt | Unusable:
        read = self._read(lease.prompt)
        return read if isinstance(read, Unusable) else PreparedPrompt(lease, *read)

    def collate(self, prepared: Sequence[PreparedPrompt]) -> Sequence[PreparedPrompt]:
        return prepared

    def postprocess(
        self, prepared: PreparedPrompt, generated: Sequence[Episode | Failed]
    ) -> list[Outcome] | Future[list[Outcome]]:
        """Returns a future if rewards are not computed inline."""
        episodes = [episode for episode in generated if isinstance(episode, Episode)]
        scored = self._score(prepared.prompt, episodes) if episodes else []
        on_error = self.scoring.settings.reward_on_error
        if not isinstance(scored, Future):
            return outcomes_of(generated, scored, on_error)
        outcomes: Future[list[Outcome]] = Future()

        def combine(scored: Future[list[Scored]]) -> None:
            try:
                outcomes.set_result(outcomes_of(generated, scored.result(), on_error))
            except BaseException as error:  # noqa: BLE001 - raised where the outcomes are awaited
                outcomes.set_exception(error)

        scored.add_done_callback(combine)
        return outcomes

    def close(self) -> None:
        """Ends the threads and processes that compute rewards."""
        self.scoring.close()

    def _read(self, position: int) -> tuple[Prompt, list[int]] | Unusable:
        count = self.environment.count
        prompt = self.environment.prompt(position % count if count else position)
        shown = prompt.shown()
        if isinstance(shown, str):
            token_ids = [*self.tokenizer.bos_ids, *self.tokenizer.encode(shown)] if shown else []
        elif self.chat is None:
            raise ConfigError("the prompts are chat messages, but the model's tokenizer has no chat template; use text")
        else:
            token_ids = self.tokenizer.encode(self.chat.opening(self._with_tools(shown)))
        if not token_ids:
            return Unusable("the prompt is empty: the model needs at least one token")
        if not self._fits(len(token_ids)):
            return Unusable(
                f"the prompt has {len(token_ids)} tokens; with {self.sampling.max_new_tokens} new ones that exceeds "
                f"the model's {self.engine.max_positions} positions"
            )
        return prompt, token_ids

    def _with_tools(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Describes the tools in the first message, if the template does not support tools."""
        environment: Any = self.environment
        tools = getattr(environment, "tools", None)
        if not tools or self.chat is None or self.chat.tools or not getattr(environment, "introduce", True):
            return messages
        first = messages[0] | {"content": f"{environment.description()}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]

    def _turn_end_ids(self) -> list[int]:
        """The token that the chat template writes at the end of a turn, if it is one token."""
        end = self.chat.turn_end() if self.chat is not None else ""
        ids = self.tokenizer.encode(end) if end else []
        return ids if len(ids) == 1 else []

    def _fits(self, context_tokens: int) -> bool:
        longest = self.engine.max_positions
        return longest is None or context_tokens + self.sampling.max_new_tokens <= longest

    def begin(self, prepared: PreparedPrompt, member: int) -> Episode:
        """The episode to generate: a new one from the prompt, or one that another worker kept unfinished."""
        lease = prepared.lease
        if self.kept is not None:
            episode = self.kept.take(lease.prompt, lease.attempt, member, min_version=lease.min_version)
            if episode is not None and self._continues(episode, prepared):
                return episode
        return Episode.start(prepared.token_ids)

    def _continues(self, episode: Episode, prepared: PreparedPrompt) -> bool:
        """Whether a kept episode fits the settings of this run, which may have changed when it was resumed."""
        same_prompt = np.array_equal(episode.pieces[0].token_ids, prepared.token_ids)
        return same_prompt and episode.turn_tokens < self.sampling.max_new_tokens

    def keep(self, prepared: PreparedPrompt, member: int, episode: Episode) -> None:
        """Stores the episode for the worker that generates this member next, if `kept` is set."""
        if self.kept is not None:
            self.kept.keep(prepared.lease.prompt, prepared.lease.attempt, member, episode)

    def remaining_sampling(self, episode: Episode) -> Sampling:
        """Sampling for the rest of a completion, which may have been kept unfinished."""
        if not episode.turn_tokens:
            return self.sampling
        missing = self.sampling.max_new_tokens - episode.turn_tokens
        return msgspec.structs.replace(self.sampling, max_new_tokens=missing)

    def add_completion(self, episode: Episode, drawn: Completion) -> bool:
        """Appends what the engine drew; False if it was interrupted before the completion was finished."""
        drawn = cut_at(self.tokenizer.decode, self.stop_strings, drawn, episode.turn_ids())
        episode.generated(drawn.token_ids, drawn.logprobs, drawn.versions, drawn.version, drawn.digest)
        if drawn.ending == "interrupted":
            return False
        ids = episode.turn_ids()
        inner = getattr(self.tokenizer, "inner", None)
        drawn_text = inner.decode(ids, skip_special_tokens=False) if self.chat is not None and inner else None
        episode.finish_turn(self.tokenizer.decode(ids), drawn.ending, drawn_text)
        return True

    def take_reply(self, prepared: PreparedPrompt, episode: Episode) -> bool:
        """Appends the environment's reply to a finished completion; True if the policy must generate again."""
        if len(episode.completions) >= self.max_turns:
            return False
        environment: Any = self.environment
        shown = prepared.prompt.shown()
        completions = episode.completions if isinstance(shown, str) else self._completion_texts(episode)
        reply = environment.reply(prepared.prompt, completions)
        if reply is None:
            return False
        if isinstance(shown, str):
            text, back_to = (reply, None) if isinstance(reply, str) else (reply.text, reply.to)
            token_ids = self.tokenizer.encode(text)
        else:
            text, token_ids, back_to = self._next_turn(shown, episode, reply)
        if not self._fits(episode.context_tokens(back_to) + len(token_ids)):
            episode.endings[-1] = "context"  # the reply does not fit into the context
            return False
        episode.replied(text, token_ids, back_to)
        return True

    def _completion_texts(self, episode: Episode) -> list[str]:
        assert self.chat is not None
        return [self.chat.without_end(text) for text in episode.drawn_texts]

    def _next_turn(self, shown: list[ChatMessage], episode: Episode, reply: Any) -> tuple[str, list[int], int | None]:
        """The reply as JSON messages, the tokens that the chat template adds for them, and where to go back to."""
        assert self.chat is not None
        messages = reply_messages(reply)
        replies = [*map(json.loads, episode.replies), messages]
        turn = self.chat.next_turn(self._with_tools(shown), episode.drawn_texts, replies)
        return json.dumps(messages), self.tokenizer.encode(turn.text), turn.back_to

    def _conversation(self, prompt: Prompt, episode: Episode) -> list[ChatMessage]:
        shown = prompt.shown()
        if not isinstance(shown, str):
            assert self.chat is not None
            return self.chat.conversation(shown, episode.drawn_texts, [*map(json.loads, episode.replies)])
        completions = [{"role": "assistant", "content": text} for text in episode.completions]
        replies = [{"role": "user", "content": text} for text in episode.replies]
        both = itertools.chain.from_iterable(itertools.zip_longest(completions, replies))
        return [{"role": "user", "content": shown}, *(message for message in both if message is not None)]

    def _score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored] | Future[list[Scored]]:
        """Scores the last completion; the column `turns` has all completions."""
        columns: dict[str, list[Any]] = {
            "ended": [episode.endings[-1] for episode in episodes],
            "token_counts": [episode.generated_tokens for episode in episodes],
        }
        if self._passes_ids:
            columns["completion_ids"] = [_last_completion(episode) for episode in episodes]
        if self._passes_conversations:
            columns["conversations"] = [self._conversation(prompt, episode) for episode in episodes]
        columns |= {name: [value] * len(episodes) for name, value in prompt.columns.items()}
        if self.max_turns > 1:
            columns["turns"] = [[*episode.completions] for episode in episodes]
        completions = [episode.completions[-1] for episode in episodes]
        return self.scoring.score([prompt.shown()] * len(episodes), completions, columns)


def _last_completion(episode: Episode) -> list[int]:
    """Its tokens."""
    return episode.context()[episode.context_tokens(len(episode.completions) - 1) :]


def chat_of(tokenizer: Tokenizer, environment: Any) -> Chat | None:
    """The model's chat template, with the environment's tools if it supports tools."""
    inner: Any = getattr(tokenizer, "inner", None)
    template = getattr(inner, "chat_template", None)
    if template is None:
        return None
    tools = getattr(environment, "tools", None) or {}
    supported = bool(tools) and "tools" in str(template) and getattr(environment, "introduce", True)

    def render(messages: Sequence[ChatMessage], tools: Sequence[Any], prompting: bool) -> str:
        return inner.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompting
        )

    return Chat(render, [tool_schema(tool) for tool in tools.values()] if supported else [])


def reply_messages(reply: Any) -> list[ChatMessage]:
    """An environment's reply as chat messages; a text becomes a message of the user."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}]
    messages = reply if isinstance(reply, Sequence) else [reply]
    if not all(isinstance(message, Message | dict) for message in messages):
        raise ConfigError(
            f"an environment with chat prompts must reply with a text or messages, found {type(reply).__name__}; "
            "only environments with text prompts can take the conversation back"
        )
    return [message.plain() if isinstance(message, Message) else message for message in messages]


def outcomes_of(
    generated: Sequence[Episode | Failed], scored: Sequence[Scored], on_error: float | None = None
) -> list[Outcome]:
    """Episodes with their rewards. An episode without a reward is kept, without an advantage, if others of the lease
    have a reward. If none has, all fail: they are retried, or, if no reward function applies, never again. An episode
    whose environment raised has the reward `on_error`."""
    episodes = [episode for episode in generated if isinstance(episode, Episode)]
    scored = [Scored(on_error, {}) if it.broken else score for it, score in zip(episodes, scored, strict=True)]
    rewards = [one.reward for one in scored if one.reward is not None]
    scores = iter(scored)
    outcomes: list[Outcome] = []
    for episode in generated:
        if isinstance(episode, Failed):
            outcomes.append(episode)
            continue
        score = next(scores)
        reason = "" if score.reward is not None else score.error or "no reward function applies to this completion"
        if not rewards:
            outcomes.append(Failed(reason, poison=not score.error))
            continue
        arrays = episode.arrays() | reward_part_arrays(score.parts)
        if reason:
            arrays[UNSCORED] = np.ones(1, np.uint8)
        assert episode.version is not None
        outcomes.append(
            Finished(
                arrays=arrays,
                reward=sum(rewards) / len(rewards) if score.reward is None else score.reward,
                version=Version(episode.version),
                weights_digest=episode.digest,
                length=episode.generated_tokens,
                unscored=reason,
            )
        )
    return outcomes


class LanguageWorkload(LanguageHooks):
    """The hooks, with `generate`.

    One conversation per sample is in flight, and none waits for others of its batch before its next turn.
    `reply_threads` threads compute the environment's replies. An error in the engine or the environment fails only its
    own episode.
    """

    def __init__(
        self,
        environment: TextEnvironment,
        engine: RequestEngine,
        tokenizer: Tokenizer,
        settings: RolloutSection = RolloutSection(),
        **options: Any,
    ) -> None:
        """`options` as for `LanguageHooks`."""
        super().__init__(environment, engine, tokenizer, settings, **options)
        self._replies = Offload(settings.reply_threads if self.max_turns > 1 else 0, "reply")

    async def generate(self, batch: Sequence[PreparedPrompt]) -> list[list[Episode | Failed]]:
        """Raises Aborted when the engine was interrupted; unfinished episodes are then kept, if `kept` is set."""
        owners = [(prepared, member) for prepared in batch for member in prepared.lease.members]
        episodes = await asyncio.to_thread(self._begin_all, owners)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._converse(prepared, member, episode))
                    for (prepared, member), episode in zip(owners, episodes, strict=True)
                ]
        except BaseExceptionGroup as errors:  # the engine is lost: one error, not one per episode
            raise errors.exceptions[0] from errors
        results = [task.result() for task in tasks]
        if None in results:
            await asyncio.to_thread(self._keep_finished, owners, results)
            raise Aborted("generation was interrupted; unfinished episodes continue from their kept tokens")
        done = iter(results)
        return [[made for _ in prepared.lease.members if (made := next(done)) is not None] for prepared in batch]

    async def _converse(self, prepared: PreparedPrompt, member: int, episode: Episode) -> Episode | Failed | None:
        """Runs one episode to its end. None if it was interrupted: it is then already kept."""
        key = object() if self.max_turns > 1 else None
        try:
            # A kept episode may have been interrupted before or after the environment's reply.
            active = episode.awaits_completion or await self._take_reply(prepared, episode)
            while active:
                drawn = await self.engine.complete(episode.context(), self.remaining_sampling(episode), cache_key=key)
                if not self.add_completion(episode, drawn):
                    await asyncio.to_thread(self.keep, prepared, member, episode)
                    return None
                active = await self._take_reply(prepared, episode)
        except (PeerLost, RunFailed):
            raise
        except (Exception, asyncio.CancelledError) as error:  # fails this episode, recorded with its traceback
            if is_cancellation(error):
                raise
            return Failed(traceback.format_exc(), hook="generate")
        finally:
            if key is not None:
                self.engine.forget(key)
        return episode

    async def _take_reply(self, prepared: PreparedPrompt, episode: Episode) -> bool:
        if len(episode.completions) >= self.max_turns:
            return False
        try:
            return await self._replies.run(self.take_reply, prepared, episode)
        except (PeerLost, RunFailed, ConfigError):
            raise
        except Exception:  # raised by the environment
            if self.scoring.settings.reward_on_error is None:
                raise
            log.warning("an environment raised in its reply: the episode ends with env.reward_on_error", exc_info=True)
            episode.break_off()
            return False

    def _begin_all(self, owners: Sequence[tuple[PreparedPrompt, int]]) -> list[Episode]:
        return [self.begin(prepared, member) for prepared, member in owners]

    def _keep_finished(
        self, owners: Sequence[tuple[PreparedPrompt, int]], results: Sequence[Episode | Failed | None]
    ) -> None:
        """Keeps finished episodes too: the whole lease is returned, so they would be generated again."""
        for (prepared, member), result in zip(owners, results, strict=True):
            if isinstance(result, Episode):
                self.keep(prepared, member, result)
