"""One optimiser step: micro-batches in, changed weights and metrics out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batch.assemble import Sample
from penstock.batch.pack import PackSettings, pack
from penstock.engines.models import Policy
from penstock.errors import ConfigError, RunFailed
from penstock.runtime.tensors import free_device_caches
from penstock.train.comparison import TOKENS, Difference, longest, summed
from penstock.train.objectives import HOST, PARTS, Metrics, Objective, Part, PriorLogprobs, Totals, Work
from penstock.train.optim import Optimizer, learning_rate
from penstock.train.settings import OptimizerSection
from penstock.train.world import ALONE, World, add_metrics

log = logging.getLogger(__name__)


class Learner:
    """Owns the optimiser. Every step is a function of weights, optimiser state, step number and data alone.

    A step has two phases that need not share the device: `score` computes the log-probabilities of the reference, the
    teacher and the policy before its first update; `step` trains the policy.
    """

    def __init__(
        self,
        objective: Objective,
        settings: OptimizerSection = OptimizerSection(),
        *,
        steps: int = 1,
        seed: int = 0,
        progressed: Callable[[str], None] = lambda doing: None,
        world: World = ALONE,
        check_logprobs: bool = True,
    ) -> None:
        """`steps` is the length of the run, for schedules; `seed` determines the order in which data is visited. With
        `check_logprobs` the first step whose samples were drawn with its weights compares log-probabilities.

        `progressed` is called for every micro-batch, so that a long step counts as progress. The ranks of a `world`
        score and step together, each over its own micro-batches.
        """
        self.world = world
        self.objective = objective
        self.policy: Policy = objective.policy
        self.steps = 0
        self._run_steps = steps
        self._seed = seed
        self._progressed = progressed
        self._settings = settings
        self._optimizer = Optimizer(self.policy.module, settings)
        self._compares = check_logprobs
        """Whether no samples of the policy's own weights were compared yet."""
        self._skipped = 0
        """Consecutive updates that were not finite."""

    def __repr__(self) -> str:
        return f"<Learner {type(self.policy).__name__} after {self.steps} steps>"

    @property
    def scored_by(self) -> tuple[Part, ...]:
        """The parts that `score` needs on the device; empty if a step needs only the samples' log-probabilities."""
        return self.objective.scored_by(self._several_updates)

    @property
    def _several_updates(self) -> bool:
        return self._settings.epochs * self._settings.minibatches > 1

    def score(self, micro_batches: Sequence[Any]) -> list[PriorLogprobs]:
        """The log-probabilities that a step over this batch needs, one entry per micro-batch. Changes nothing."""
        scores: list[PriorLogprobs] = []
        for score in self.objective.score(self._levelled(micro_batches), self._several_updates):
            scores.append(score)
            self._progressed(f"scoring step {self.steps}: {len(scores)} of {len(micro_batches)} micro-batches")
        return scores

    def step(
        self,
        micro_batches: Sequence[Any],
        scores: Sequence[PriorLogprobs] | None = None,
        drawn_now: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """Trains on one batch and returns its metrics. Without `scores` it is scored first.

        `drawn_now` are those of its samples that the present weights have drawn. Raises RunFailed, before any change,
        if their log-probabilities are not those of the policy.

        An empty batch changes nothing but the step number. Raises RunFailed if too many consecutive updates are not
        finite; the weights are then those of the last finite update.
        """
        compared = self._compare(drawn_now) if self._compares else {}
        if scores is None:
            scores = self.score(micro_batches)
        rate = self.learning_rate(self.steps)
        self.policy.prepare_training()
        level = self._levelled(micro_batches)
        scores = [*scores, *[PriorLogprobs()] * (len(level) - len(scores))]
        work = self.objective.prepare(level, scores, self._device())
        metrics = self._train(work, rate)
        self.steps += 1
        return metrics | compared | {"learning_rate": rate}

    def _compare(self, drawn_now: Sequence[Sample]) -> dict[str, float]:
        """All ranks compare together, and come to the same result."""
        samples = longest(drawn_now)
        settings = PackSettings(layout=self.objective.packing, micro_batch_tokens=TOKENS)
        batches = self._levelled(pack(samples, np.zeros(len(samples), np.float32), settings))
        count, total, most = summed(self.objective.differences(batches), one_sided=self.objective.cut)
        count, total = self.world.total(count, total)
        if not count:
            return {}
        most = self.world.merged({"of_rank_max": most})["of_rank_max"]
        difference = Difference(count, total / count, most)
        dtype = getattr(self.policy, "dtype", next(self.policy.module.parameters()).dtype)
        difference.check(self.steps, dtype, self._device())
        self._compares = False
        return difference.metrics()

    def _levelled(self, micro_batches: Sequence[Any]) -> Sequence[Any]:
        """Padded with None to the largest count of any rank: every pass of a sharded model involves all ranks."""
        return [*micro_batches, *[None] * (self.world.largest(len(micro_batches)) - len(micro_batches))]

    def _over_ranks(self, totals: Totals) -> Totals:
        return Totals(*self.world.total(totals.tokens, totals.samples))

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(self._settings, step, self._run_steps)

    def onload(self, device: torch.device, parts: Iterable[Part] = PARTS) -> None:
        """Moves these parts to a device; they may be on it already. The others are not moved."""
        for part in parts:
            self._move(part, device)

    def offload(self) -> None:
        """Moves everything to the host and frees the device memory, gradients and caches included."""
        self._optimizer.zero_grad()
        self.onload(HOST)
        free_device_caches()

    def state(self) -> dict[str, Tensor]:
        """Live optimiser tensors and the step number, by name: all that `load_state` needs to resume exactly."""
        return {"steps": torch.tensor(self.steps)} | self._optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Resumes from a `state`. The policy's tensors are restored before."""
        if "steps" not in tensors:
            raise ConfigError("this optimiser state belongs to another model: it has no entry 'steps'")
        self._optimizer.load_state({entry: tensor for entry, tensor in tensors.items() if entry != "steps"})
        self.steps = int(tensors["steps"])

    def _move(self, part: Part, device: torch.device) -> None:
        if part == "policy":
            self.policy.module.to(device)  # parameters stay the same objects: they are the optimiser's keys
        elif part == "reference":
            for scorer in (self.objective.reference, self.objective.teacher):
                if scorer is not None:
                    scorer.module.to(device)
        elif part == "optimizer":
            self._optimizer.to(device)

    def _device(self) -> torch.device:
        return next(self.policy.module.parameters()).device

    def _train(self, work: Work, rate: float) -> dict[str, float]:
        if not work.units:
            return {"tokens": 0.0, "sequences": 0.0}
        sums: dict[str, float] = {}
        losses: list[float] = []
        norms: list[float] = []
        seen = 0.0
        for epoch in range(self._settings.epochs):
            for chosen in np.array_split(self._order(work.units, epoch), min(self._settings.minibatches, work.units)):
                totals = self._over_ranks(work.totals_of(chosen))
                if not totals.tokens:
                    continue
                loss, metrics = self._gradient(work, chosen, totals)
                norm = self._update(loss, rate)
                if norm is None:
                    continue
                losses.append(loss)
                norms.append(norm)
                seen += totals.tokens
                add_metrics(sums, metrics)
        sums = self.world.merged(sums)
        whole = self._over_ranks(work.totals)
        means = {name: value if name.endswith("_max") else value / seen for name, value in sums.items()}
        if norms:
            means |= {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        skipped = {"skipped_updates": float(self._skipped)} if self._skipped else {}
        return means | skipped | {"tokens": whole.tokens, "sequences": whole.samples, "updates": float(len(norms))}

    def _gradient(self, work: Work, chosen: np.ndarray, totals: Totals) -> tuple[float, dict[str, float]]:
        """Sums the gradient of one update; returns loss and metrics. Out of device memory, passes get smaller."""
        while True:
            try:
                return self._propagate(work, chosen, totals)
            except torch.OutOfMemoryError as error:
                if not self.world.alone:  # its shards, and those of other ranks, are in the middle of a pass
                    raise RunFailed(
                        f"rank {self.world.rank} is out of device memory: {error}. Lower "
                        "train.tokens_per_micro_batch, or set train.activation_checkpointing = true"
                    ) from error
            self._optimizer.zero_grad()  # the sum so far may contain part of a pass
            free_device_caches()
            work.shrink()

    def _propagate(self, work: Work, chosen: np.ndarray, totals: Totals) -> tuple[float, dict[str, float]]:
        losses: list[Tensor] = []
        sums: list[Metrics] = []
        for loss, metrics in work.losses(chosen, totals):
            loss.backward()
            losses.append(loss.detach())
            sums.append(metrics)
            self._progressed(f"training step {self.steps}: {len(sums)} micro-batches of {len(chosen)}")
        found: dict[str, float] = {}
        for metrics in sums:
            add_metrics(found, {name: float(value) for name, value in metrics.items()})
        return self.world.total(float(torch.stack(losses).sum()))[0], found

    def _order(self, size: int, epoch: int) -> np.ndarray:
        """A random permutation, the same after a resume; the given order for a single update."""
        if not self._several_updates:
            return np.arange(size)
        return np.random.default_rng((self._seed, self.steps, epoch)).permutation(size)

    def _update(self, loss: float, rate: float) -> float | None:
        """Clips, checks and applies the gradient. Returns the norm before clipping, or None if it was skipped."""
        norm = self._optimizer.clip()
        if math.isfinite(norm) and math.isfinite(loss):
            self._optimizer.update(rate)
            self._skipped = 0
            return norm
        self._optimizer.zero_grad()
        self._skipped += 1
        found = f"training step {self.steps} gave loss {loss:g}, gradient norm {norm:g}: the update was not applied"
        if self._skipped > self._settings.skip_updates:
            raise RunFailed(
                f"{found}, like {self._skipped - 1} before it. Lower the learning rate or check for extreme rewards, "
                "then resume from the last checkpoint"
            )
        log.warning("%s (%d of %d that may be skipped)", found, self._skipped, self._settings.skip_updates)
        return None
