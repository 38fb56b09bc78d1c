"""`[pipeline.rollout]`: how samples are generated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from penstock.control.settings import GroupSection
from penstock.records.section import Fraction, ImportPath, NonNegative, Positive, PositiveFloat


class RolloutSection(GroupSection):
    ranks: Positive = 1
    """Processes of one worker that generate in step, each with an engine of its own and its share of every batch."""
    devices_per_worker: Positive = 1
    """Devices of the pool that one worker occupies while it is awake."""
    workload: ImportPath | None = None
    """Your own five hooks, as `package.module:Class`; the built-in one fits the environment otherwise."""
    batch_samples: Positive = 64
    """Samples of one generate call, unless a call is one group (see `concurrency`)."""
    max_new_tokens: Positive = 16
    """Language models: the longest completion."""
    temperature: PositiveFloat = 1.0
    """Language models: of the sampling."""
    top_k: Positive | None = None
    """Draw only from the k most likely tokens. With this, `top_p` or `min_p` the samples come from a narrower policy
    than the one that is trained: their recorded log-probabilities are those of the narrower one, so the importance
    weight of an up-to-date token is the share p <= 1 of the full distribution that was left, and what was cut off is
    never learned about. `token_loss.importance = "none"` weighs all tokens alike instead."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw only from the most likely tokens that together have this probability; applies after `min_p` and `top_k`."""
    min_p: Fraction = 0.0
    """Draw only from tokens at least this likely in proportion to the most likely one."""
    stop_ids: list[NonNegative] = []
    """Tokens that end a completion, besides those of the model: its tokenizer's end of sequence, what its
    `generation_config` names, and what its chat template writes after a turn."""
    stop_strings: list[str] = []
    """Texts that end a completion. The engine does not look for them: what it drew after one is dropped."""
    max_turns: Positive = 1
    """Language models: how many completions one episode may have."""
    reply_threads: Positive = 8
    """Language models: how many environments may compute their reply at once."""
    prefetch: bool = True
    """Overlap leasing, preparation and post-processing with generation. Read live."""
    queue_samples: Positive | None = None
    """Bound on samples waiting between two stages; two calls' worth by default, and at least 128."""
    queue_mb: Positive = 1024
    """Bound on prepared and generated data waiting between two stages."""
    concurrency: Positive = 1
    """Generate calls in flight, each of up to `batch_samples`. For language models, and neither of the two given, a
    call is one group and there are enough to fill the engine's rows twice; with either given, the engine has rows for
    all of them."""
    preparations: Positive = 1
    """Prompts prepared at once."""
    preparation_processes: NonNegative | None = None
    """Language models: processes that read prompts from the environment. 0 reads them in threads of the worker, which
    is better unless reading a prompt computes in Python for long. Unset: threads, until prompts are measured to compute
    for long; from then on one process."""
    ring_mb: Positive = 64
    """Room for finished samples that the trainer has not fetched yet, at the least: a ring always has room for those
    of every step under way. It is in shared memory, which is taken as it is used."""
    ring_slots: Positive = 4096
    """How many samples that may be, at the least: a ring always has room for those of every step under way."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one. Every worker has its own, as far as there are any; `cuda:1` is
    that one for all of them."""
    threads: Positive = 1
    """Torch threads of a worker."""

    @property
    def waiting_samples(self) -> int:
        """`queue_samples`, or what follows from the size of a call."""
        return self.queue_samples or max(128, 2 * self.batch_samples)

    @model_validator(mode="after")
    def _queue_holds_a_batch(self) -> RolloutSection:
        if self.waiting_samples < self.batch_samples:
            raise ValueError(
                f"queue_samples = {self.queue_samples} holds no call of batch_samples = {self.batch_samples}, so every "
                f"call would be cut to {self.queue_samples}; leave it out, or make it at least {self.batch_samples}"
            )
        return self
