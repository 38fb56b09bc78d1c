"""A few rollouts of some steps, written for people to read: one JSON object per line.

    {"step": 40, "prompt": 655, "sample": 5243, "version": 39, "reward": 0.75, "advantage": 0.41, "length": 4,
     "pieces": [{"by": "context", "text": "hcab>"}, {"by": "policy", "text": "hcaa"}]}

A separate thread writes. It never delays or stops training: rollouts that do not fit into the short queue are dropped
and counted, and a disk error ends the log with one warning.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from penstock.batch.columns import REWARD_PART, TRUNCATED, reward_parts, truncated
from penstock.train.settings import SamplesSection

logger = logging.getLogger(__name__)

QUEUED_STEPS = 8
SAMPLES = SamplesSection()


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """One sample as it was trained."""

    prompt: int
    sample: int
    version: int
    reward: float
    advantage: float | None
    """None: it was only evaluated."""
    arrays: Mapping[str, np.ndarray]


class RolloutLog:
    """Appends to `path` the first `samples_per_step` rollouts of every `every_steps`-th step."""

    def __init__(
        self,
        path: Path,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        every_steps: int = SAMPLES.save_every_steps,
        samples_per_step: int = SAMPLES.save_count,
    ) -> None:
        """`decode` turns token ids into text; without it the ids themselves are written."""
        self._path = path
        self._decode = decode
        self._every_steps = every_steps
        self._samples_per_step = samples_per_step
        self._queue: queue.Queue[tuple[int, list[TrainedRollout]] | None] = queue.Queue(QUEUED_STEPS)
        self.written = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="rollout-log", daemon=True)
        if samples_per_step > 0:
            self._thread.start()

    def __repr__(self) -> str:
        return (
            f"<RolloutLog {self._path}: {self.written} written, {self.dropped} dropped, {self._queue.qsize()} queued>"
        )

    def writes(self, step: int) -> bool:
        """Whether `offer` would write this step: check first, to gather no rollouts without need."""
        return self._samples_per_step > 0 and step % self._every_steps == 0 and self._thread.is_alive()

    def offer(self, step: int, rollouts: Sequence[TrainedRollout]) -> None:
        """Copies the few that will be written and returns at once; the arrays may be reused afterwards."""
        if not self.writes(step):
            return
        kept = [
            TrainedRollout(r.prompt, r.sample, r.version, r.reward, r.advantage, _readable(r.arrays))
            for r in rollouts[: self._samples_per_step]
        ]
        try:
            self._queue.put_nowait((step, kept))
        except queue.Full:
            self.dropped += len(kept)

    def close(self, timeout_s: float) -> bool:
        """Writes the queued rollouts; False on a timeout."""
        if self._samples_per_step <= 0:
            return True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write(self) -> None:
        """Consumes offered steps, produces lines. Waits for `offer` or `close`."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                while (item := self._queue.get()) is not None:
                    step, rollouts = item
                    for rollout in rollouts:
                        file.write(orjson.dumps(self._line(step, rollout), option=orjson.OPT_APPEND_NEWLINE))
                        self.written += 1
                    file.flush()
        except OSError as error:
            logger.warning("no more rollouts will be written to %s: %s; training continues", self._path, error)

    def _line(self, step: int, rollout: TrainedRollout) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": step,
            "prompt": rollout.prompt,
            "sample": rollout.sample,
            "version": rollout.version,
            "reward": round(rollout.reward, 6),
        }
        if rollout.advantage is not None:
            line["advantage"] = round(rollout.advantage, 6)
        arrays = rollout.arrays
        if "token_ids" in arrays:
            line |= {"truncated": truncated(arrays)}
            if parts := reward_parts(arrays):
                line |= {"reward_parts": {name: round(value, 6) for name, value in parts.items()}}
            return line | {"length": int(arrays["loss_mask"].sum()), "pieces": self._pieces(arrays)}
        return line | {
            "length": len(arrays["rewards"]),
            "return": round(float(arrays["rewards"].sum()), 6),
            "terminated": bool(arrays["terminated"][0]),
            "actions": arrays["actions"].tolist(),
        }

    def _pieces(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """Runs of trained and untrained tokens, in order."""
        token_ids, mask = arrays["token_ids"], arrays["loss_mask"]
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        pieces = []
        for start, end in itertools.pairwise(edges):
            ids = token_ids[start:end].tolist()
            content = {"token_ids": ids} if self._decode is None else {"text": self._decode(ids)}
            pieces.append({"by": "policy" if mask[start] else "context"} | content)
        return pieces


def _readable(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies of the small arrays that a line consists of, without observations and routing."""
    names = ("token_ids", "loss_mask", "actions", "rewards", "terminated", TRUNCATED)
    return {name: arrays[name].copy() for name in arrays if name in names or name.startswith(REWARD_PART)}
