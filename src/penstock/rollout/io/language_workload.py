"""Language models: tokenise the prompt, sample completions, score them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.errors import ConfigError
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Failed, Finished, Outcome, Unusable
from penstock.rollout.io.torch_engine import Completion, Sampling, TorchEngine


class PromptLike(Protocol):
    """What is needed of a prompt."""

    @property
    def text(self) -> str: ...

    @property
    def columns(self) -> dict[str, Any]: ...

    def shown(self) -> str | list[dict[str, str]]: ...


class Environment(Protocol):
    """What is needed of an environment."""

    def prompt(self, position: int) -> PromptLike: ...

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]: ...


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    pad_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class PreparedPrompt(msgspec.Struct):
    """A prompt ready for the engine."""

    lease: PromptLease
    prompt: PromptLike
    token_ids: list[int]

    @property
    def size_bytes(self) -> int:
        return 8 * len(self.token_ids)


class LanguageWorkload:
    """One completion per sample."""

    def __init__(
        self,
        environment: Environment,
        engine: TorchEngine,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
    ) -> None:
        self.environment = environment
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, eos_id=tokenizer.eos_id)

    def preflight(self) -> None:
        """Checks that the first prompt can be shown to the model at all."""
        prepared = self._read(0)
        if isinstance(prepared, Unusable):
            raise ConfigError(f"the first prompt of the environment cannot be used: {prepared.reason}")

    def prepare(self, lease: PromptLease) -> PreparedPrompt | Unusable:
        read = self._read(lease.prompt)
        if isinstance(read, Unusable):
            return read
        prompt, token_ids = read
        return PreparedPrompt(lease, prompt, token_ids)

    def _read(self, position: int) -> tuple[PromptLike, list[int]] | Unusable:
        prompt = self.environment.prompt(position)
        token_ids = self.tokenizer.encode(prompt.text)
        if not token_ids:
            return Unusable("the prompt is empty: the model has no token to go on from")
        longest = self.engine.max_positions
        if longest is not None and len(token_ids) + self.sampling.max_new_tokens > longest:
            return Unusable(
                f"the prompt has {len(token_ids)} tokens; with {self.sampling.max_new_tokens} new ones that exceeds "
                f"the model's {longest} positions"
            )
        return prompt, token_ids

    def collate(self, prepared: Sequence[PreparedPrompt]) -> list[PreparedPrompt]:
        return list(prepared)

    def generate(self, batch: Sequence[PreparedPrompt]) -> list[list[Completion]]:
        repeats = [len(prepared.lease.samples) for prepared in batch]
        completions = iter(
            self.engine.generate([prepared.token_ids for prepared in batch], self.sampling, repeats=repeats)
        )
        return [[next(completions) for _ in range(repeat)] for repeat in repeats]

    def postprocess(self, prepared: PreparedPrompt, generated: Sequence[Completion]) -> list[Outcome]:
        texts = [self.tokenizer.decode(completion.token_ids.tolist()) for completion in generated]
        count = len(generated)
        columns = {name: [value] * count for name, value in prepared.prompt.columns.items()}
        rewards = self.environment.score([prepared.prompt.shown()] * count, texts, **columns)
        return [
            Failed("no reward function applies to this completion", poison=True)
            if reward is None
            else self._finished(prepared, completion, reward)
            for completion, reward in zip(generated, rewards, strict=True)
        ]

    def _finished(self, prepared: PreparedPrompt, completion: Completion, reward: float) -> Finished:
        prompt_tokens = len(prepared.token_ids)
        length = len(completion.token_ids)
        token_ids = np.empty(prompt_tokens + length, dtype=np.int32)
        token_ids[:prompt_tokens] = prepared.token_ids
        token_ids[prompt_tokens:] = completion.token_ids
        loss_mask = np.zeros(prompt_tokens + length, dtype=np.uint8)
        loss_mask[prompt_tokens:] = 1
        logprobs = np.zeros(prompt_tokens + length, dtype=np.float32)
        logprobs[prompt_tokens:] = completion.logprobs
        versions = completion.versions.copy()
        versions[:, 0] += prompt_tokens
        return Finished(
            arrays={"token_ids": token_ids, "loss_mask": loss_mask, "logprobs": logprobs, "versions": versions},
            reward=reward,
            version=Version(completion.version),
            weights_digest=completion.digest,
            length=length,
        )
