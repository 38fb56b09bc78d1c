"""Samples from a transformers causal language model, in batches, with a KV cache.

Shape suffixes: B rows of the batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engines.requests import Completion, Ending, Sampling
from penstock.engines.serving import Serving, ServingEngine
from penstock.errors import ConfigError


class SamplingEngine(ServingEngine):
    """One causal language model on one device: the weights it serves, how tokens are drawn, how it is interrupted."""

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_id: int,
        version: int = 0,
        digest: str = "",
        seed: int = 0,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        super().__init__(Serving(model, version=version, digest=digest), seed)
        self.pad_id = pad_id
        config: Any = getattr(model, "config", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._progressed = progressed
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """Ends all generations, now and later, at the next decode step, with what they have; `resume` undoes it."""
        self._interrupted.set()

    def resume(self) -> None:
        """Allows generation after `interrupt`."""
        self._interrupted.clear()

    def check_fits(self, context_tokens: int, sampling: Sampling) -> None:
        """ConfigError for what can never be generated."""
        if context_tokens == 0:
            raise ConfigError("cannot generate from an empty prompt: it has no token to go on from")
        if self.max_positions is not None and context_tokens + sampling.max_new_tokens > self.max_positions:
            raise ConfigError(
                f"a prompt of {context_tokens} tokens and {sampling.max_new_tokens} new ones exceed the model's "
                f"{self.max_positions} positions; shorten the prompt or max_new_tokens"
            )

    def sample(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Next tokens and the log-probabilities of drawing them, in float32."""
        logprobs_BV = truncated(torch.log_softmax(logits_BV.float() / sampling.temperature, dim=-1), sampling)
        if sampling.greedy:
            tokens_B1 = logprobs_BV.argmax(-1, keepdim=True)
        else:
            tokens_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
        return tokens_B1, logprobs_BV.gather(-1, tokens_B1)

    def completion(
        self, token_ids: np.ndarray, logprobs: np.ndarray, spans: Sequence[tuple[int, int, str]], ending: Ending
    ) -> Completion:
        """A row as it is given out; a span says from which token on which version and digest."""
        spans = [span for span in spans if span[0] < len(token_ids)]
        # Interrupted before its first token, a row has no weights of its own; the engine's present ones are the truth.
        oldest = min(spans, key=lambda span: span[1], default=(0, self.version, self.digest))
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=np.array([span[:2] for span in spans], dtype=np.int32).reshape(-1, 2),
            ending=ending,
            version=oldest[1],
            digest=oldest[2],
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__} on {self.device}, {self.serving})"


class TorchEngine(SamplingEngine):
    """A batch engine: `generate` blocks until its batch is done, and may be called from several threads."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, repeats: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion per prompt, or `repeats[i]` of prompt i, side by side. Blocks; each prompt is read once."""
        if not prompts:
            return []
        for prompt in prompts:
            self.check_fits(len(prompt), sampling)
        batch = _Decoding(self, prompts, repeats or [1] * len(prompts), sampling)
        with torch.inference_mode(), self.serving.generation(batch.drop_cache):
            while batch.unfinished and not self._interrupted.is_set():
                batch.step()
                self._progressed()
        return batch.completions()


def truncated(logprobs_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: what `min_p`, `top_k` and `top_p` leave, normalised again."""
    if sampling.min_p > 0.0:
        likeliest_B1 = logprobs_BV.amax(-1, keepdim=True)
        logprobs_BV = _without(logprobs_BV, logprobs_BV < likeliest_B1 + math.log(sampling.min_p))
    if sampling.top_k is not None and sampling.top_k < logprobs_BV.shape[-1]:
        last_B1 = logprobs_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logprobs_BV = _without(logprobs_BV, logprobs_BV < last_B1)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
        before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
        beyond_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV >= sampling.top_p)
        logprobs_BV = _without(logprobs_BV, beyond_BV)
    return logprobs_BV


def _without(logprobs_BV: Tensor, left_out_BV: Tensor) -> Tensor:
    return torch.log_softmax(logprobs_BV.masked_fill(left_out_BV, -torch.inf), dim=-1)


class _Decoding:
    """One batch on its way. Rows that ended leave once half of them have; a sleep costs the cache, not the tokens."""

    def __init__(
        self, engine: TorchEngine, prompts: Sequence[Sequence[int]], repeats: Sequence[int], sampling: Sampling
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.prompts = prompts
        self.prompt_of_row = [index for index, repeat in enumerate(repeats) for _ in range(repeat)]
        rows = len(self.prompt_of_row)
        self.tokens = np.zeros((rows, sampling.max_new_tokens), dtype=np.int32)
        self.logprobs = np.zeros((rows, sampling.max_new_tokens), dtype=np.float32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.stopped = np.zeros(rows, dtype=bool)
        self.spans: list[tuple[int, int, str]] = []
        self.steps = 0
        self.live = np.arange(rows)
        """Rows still in the device batch, in its order; some of them may have ended already."""
        self.cache: Any = None
        self.inputs: dict[str, Tensor] = {}

    @property
    def unfinished(self) -> bool:
        return self.steps < self.sampling.max_new_tokens and not self.stopped.all()

    def step(self) -> None:
        """Draws one token for every live row."""
        with self.engine.serving.step() as (version, digest):
            if self.cache is None:
                logits_BV = self._read_again() if self.steps else self._read_prompts()
            else:
                logits_BV = self._forward(self.inputs)
            tokens_B1, logprobs_B1 = self.engine.sample(logits_BV, self.sampling)
            if not self.spans or self.spans[-1][1:] != (version, digest):
                self.spans.append((self.steps, version, digest))
            # Still inside the step: the cache is touched, and a sleep in between would take it away.
            self._record(tokens_B1, logprobs_B1)

    def drop_cache(self) -> None:
        """Frees the device memory; the next step reads the kept tokens again."""
        self.cache = None
        self.inputs = {}

    def _read_prompts(self) -> Tensor:
        """Reads every distinct prompt once, then gives each of its rows a copy of the cache."""
        self._start_cache(self.prompts)
        logits = self._forward(self.inputs)
        if len(self.prompt_of_row) != len(self.prompts):
            index = torch.as_tensor(self.prompt_of_row, device=self.engine.device)
            self.cache.batch_select_indices(index)
            self._select_inputs(index)
            logits = logits[index]
        return logits

    def _read_again(self) -> Tensor:
        """After a sleep: the same rows from their kept tokens."""
        self._start_cache(
            [[*self.prompts[self.prompt_of_row[row]], *self.tokens[row, : self.steps].tolist()] for row in self.live]
        )
        return self._forward(self.inputs)

    def _start_cache(self, contexts: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.engine.model.config)  # type: ignore[arg-type]
        longest = max(len(context) for context in contexts)
        ids_BT = np.full((len(contexts), longest), self.engine.pad_id, dtype=np.int64)
        mask_BT = np.zeros((len(contexts), longest), dtype=np.int64)
        for row, context in enumerate(contexts):
            ids_BT[row, longest - len(context) :] = context
            mask_BT[row, longest - len(context) :] = 1
        device = self.engine.device
        self.inputs = {"input_ids": torch.from_numpy(ids_BT).to(device)}
        # Equal lengths need no mask, and the model is faster without one.
        if not mask_BT.all():
            mask = torch.from_numpy(mask_BT).to(device)
            self.inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def _forward(self, inputs: dict[str, Tensor]) -> Tensor:
        output = self.engine.model(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _record(self, tokens_B1: Tensor, logprobs_B1: Tensor) -> None:
        tokens_B = tokens_B1[:, 0].cpu().numpy()
        going = ~self.stopped[self.live]
        rows = self.live[going]
        self.tokens[self.live, self.steps] = tokens_B
        self.logprobs[self.live, self.steps] = logprobs_B1[:, 0].cpu().numpy()
        self.lengths[rows] += 1
        if self.sampling.stop_ids:
            self.stopped[rows] = np.isin(tokens_B[going], self.sampling.stop_ids)
        self.steps += 1
        self.inputs["input_ids"] = tokens_B1
        if "attention_mask" in self.inputs:
            mask = self.inputs["attention_mask"]
            self.inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            self.inputs["position_ids"] = self.inputs["position_ids"][:, -1:] + 1
        self._drop_ended_rows()

    def _drop_ended_rows(self) -> None:
        going = ~self.stopped[self.live]
        if not self.unfinished or 2 * going.sum() > len(self.live):
            return
        index = torch.from_numpy(np.flatnonzero(going)).to(self.engine.device)
        self.live = self.live[going]
        self.cache.batch_select_indices(index)
        self._select_inputs(index)

    def _select_inputs(self, index: Tensor) -> None:
        self.inputs = {name: tensor[index] for name, tensor in self.inputs.items()}

    def completions(self) -> list[Completion]:
        return [self._completion(row) for row in range(len(self.prompt_of_row))]

    def _completion(self, row: int) -> Completion:
        length = int(self.lengths[row])
        ending: Ending = "stop" if self.stopped[row] else "interrupted" if self.unfinished else "length"
        return self.engine.completion(self.tokens[row, :length], self.logprobs[row, :length], self.spans, ending)
