"""`[pipeline.rollout]`: settings of sample generation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from penstock.control.settings import GroupSection
from penstock.records.section import LANGUAGE_ONLY, Fraction, ImportPath, NonNegative, Positive, PositiveFloat


class RolloutSection(GroupSection):
    ranks: Positive = 1
    """Ranks (processes) of one worker that generate in lockstep. Each has its own engine and a share of every batch."""
    devices_per_worker: Positive = 1
    """Devices of the pool that one worker occupies while it is awake."""
    workload: ImportPath | None = None
    """Your own workload (five hooks), as `package.module:Class`. Default: the built-in one for the environment."""
    batch_samples: Positive = 64
    """Samples per generate call, unless a call is one group (see `concurrency`)."""
    max_new_tokens: Annotated[Positive, LANGUAGE_ONLY] = 16
    """Longest completion, in tokens."""
    temperature: Annotated[PositiveFloat, LANGUAGE_ONLY] = 1.0
    """Sampling temperature."""
    top_k: Annotated[Positive | None, LANGUAGE_ONLY] = None
    """Sample only from the k most likely tokens. With this, `top_p` or `min_p`, the sampling distribution is narrower
    than the trained policy. The recorded log-probabilities are those of the narrower distribution. The importance
    weight of an on-policy token is therefore the probability p <= 1 of the tokens that remained, and the policy never
    learns about the tokens that were cut off. `token_loss.importance = "none"` weighs all tokens equally instead."""
    top_p: Annotated[float, Field(gt=0, le=1), LANGUAGE_ONLY] = 1.0
    """Sample only from the most likely tokens with this total probability. Applies after `min_p` and `top_k`."""
    min_p: Annotated[Fraction, LANGUAGE_ONLY] = 0.0
    """Sample only from tokens whose probability is at least this fraction of the most likely token's."""
    stop_ids: Annotated[list[NonNegative], LANGUAGE_ONLY] = []
    """Tokens that end a completion, in addition to the model's: its tokenizer's end of sequence, those in its
    `generation_config`, and the token that its chat template writes after a turn."""
    stop_strings: Annotated[list[str], LANGUAGE_ONLY] = []
    """Strings that end a completion. The engine does not stop at them: the tokens after one are dropped."""
    max_turns: Annotated[Positive, LANGUAGE_ONLY] = 1
    """Most completions per episode."""
    reply_threads: Annotated[Positive, LANGUAGE_ONLY] = 8
    """Environment replies computed concurrently."""
    prefetch: bool = True
    """Overlap leasing, preparation and post-processing with generation. Can be changed while the run is running."""
    queue_samples: Positive | None = None
    """Most samples waiting between two stages. Default: those of two generate calls, at least 128."""
    queue_mb: Positive = 1024
    """Most prepared and generated data waiting between two stages, in MiB."""
    concurrency: Positive = 1
    """Generate calls in flight, each of up to `batch_samples`. Language models, if neither of the two is set: a call is
    one group, and the number of calls fills the engine's rows twice. If either is set, the engine has rows for all
    calls."""
    preparations: Positive = 1
    """Prompts prepared concurrently."""
    preparation_processes: Annotated[NonNegative | None, LANGUAGE_ONLY] = None
    """Processes that read prompts from the environment. 0 reads them in threads of the worker, which
    is better unless reading a prompt takes long in Python code. Unset: threads, and one process as soon as reading a
    prompt is measured to take long."""
    ring_mb: Positive = 64
    """Minimum size of the ring of finished samples that the trainer has not fetched yet. A ring always has room for the
    samples of all steps in progress. It is in shared memory, which is allocated as it is used."""
    ring_slots: Positive = 4096
    """Minimum capacity of the ring, in samples. A ring always has room for the samples of all steps in progress."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` (a GPU if there is one). Each worker gets its own GPU as long as there are enough;
    `cuda:1` is that GPU for all workers."""
    threads: Positive = 1
    """Torch threads of a worker."""

    @property
    def waiting_samples(self) -> int:
        """`queue_samples`, or the default for this `batch_samples`."""
        return self.queue_samples or max(128, 2 * self.batch_samples)

    @model_validator(mode="after")
    def _queue_holds_a_batch(self) -> RolloutSection:
        if self.waiting_samples < self.batch_samples:
            raise ValueError(
                f"queue_samples = {self.queue_samples} < batch_samples = {self.batch_samples}, so every generate call "
                f"would be cut to {self.queue_samples}; remove it, or set it to at least {self.batch_samples}"
            )
        return self
