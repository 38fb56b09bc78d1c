"""What may go wrong in a simulated run, and how often."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of faults. A mean interval of 0 means never; a probability is per message, sample or version."""

    kill_worker_every_s: float = 0.0
    wedge_worker_every_s: float = 0.0
    """The process stays, its heartbeat goes on, but nothing in it moves."""
    mute_worker_every_s: float = 0.0
    """The heartbeat stops although the worker works on."""
    kill_trainer_every_s: float = 0.0
    kill_controller_every_s: float = 0.0
    resume_every_s: float = 0.0
    """Everything is killed at once, as when the supervisor dies, and the run is resumed."""
    controller_down_s: float = 3.0
    restart_s: float = 2.0
    exits_seen: float = 0.5
    """How often the supervisor reports a death before the heartbeat's silence does."""
    lose_request: float = 0.0
    lose_reply: float = 0.0
    repeat_request: float = 0.0
    slow_workers: int = 0
    slow_factor: float = 8.0
    sample_fails: float = 0.0
    poison_prompt: float = 0.0
    """Share of the prompts that can never be generated."""
    lose_payload: float = 0.0
    """Chance that a group of a batch cannot be fetched."""
    damage_checkpoint: float = 0.0
    """Chance that a trainer that starts again finds its newest checkpoint damaged."""
    wrong_weights: float = 0.0
    """Chance that an engine ends up with other bytes than the version it believes to serve."""
    until_s: float = float("inf")
    """No fault fires after this time."""

    @classmethod
    def everything(cls, intensity: float = 1.0) -> Faults:
        """Every fault there is, often: the default storm."""
        return cls(
            kill_worker_every_s=60.0 / intensity,
            wedge_worker_every_s=400.0 / intensity,
            mute_worker_every_s=300.0 / intensity,
            kill_trainer_every_s=120.0 / intensity,
            kill_controller_every_s=150.0 / intensity,
            resume_every_s=500.0 / intensity,
            lose_request=min(0.2, 0.02 * intensity),
            lose_reply=min(0.2, 0.02 * intensity),
            repeat_request=min(0.2, 0.02 * intensity),
            slow_workers=1,
            sample_fails=min(0.2, 0.01 * intensity),
            poison_prompt=min(0.05, 0.005 * intensity),
            lose_payload=min(0.2, 0.01 * intensity),
            damage_checkpoint=min(0.5, 0.1 * intensity),
            wrong_weights=min(0.2, 0.01 * intensity),
        )

    def poisoned(self, prompt: int) -> bool:
        """Whether a prompt can never be generated: the same for every worker and every attempt."""
        return self.poison_prompt > 0 and Random(prompt * 7919 + 1).random() < self.poison_prompt


class WholeFaults(Faults, frozen=True, kw_only=True):
    """What else may go wrong where weights, payloads, hooks and devices are simulated too. Probabilities are per
    update, transfer, lease or order."""

    stop_worker_every_s: float = 0.0
    """A worker is asked to end: it finishes or gives back what it holds, and another takes its place."""
    flip_prefetch_every_s: float = 0.0
    hook_fails: float = 0.0
    """Chance that prepare, generate or postprocess raises."""
    sick_port_every_s: float = 0.0
    """A payload port refuses, resets or falls silent, and is well again after a while."""
    port_sick_for_s: float = 15.0
    slow_transfer: float = 0.0
    corrupt_transfer: float = 0.0
    lose_acknowledgement: float = 0.0
    damage_artifact: float = 0.0
    """Chance that a published version cannot be loaded by anybody."""
    equal_bytes: float = 0.0
    """Chance that a step changes nothing, so that its version has the bytes of the one before."""
    slow_bring: float = 0.0
    """Chance that a version takes so long to bring that it may be removed meanwhile."""
    bring_fails: float = 0.0
    damage_memory: float = 0.0
    """Chance that what was staged or written is not what was brought."""
    write_fails: float = 0.0
    resume_fails: float = 0.0
    engine_hangs: float = 0.0
    """Chance that a step of an update never ends."""
    move_fails: float = 0.0
    """Chance that an order of the pool cannot be carried out."""
    move_hangs: float = 0.0

    @classmethod
    def everything(cls, intensity: float = 1.0) -> WholeFaults:
        # Wrong weights and lost payloads come about by themselves here.
        plain: dict[str, Any] = msgspec.structs.asdict(Faults.everything(intensity))
        plain["wrong_weights"] = plain["lose_payload"] = 0.0
        return cls(
            **plain,
            stop_worker_every_s=120.0 / intensity,
            flip_prefetch_every_s=30.0 / intensity,
            hook_fails=min(0.1, 0.01 * intensity),
            sick_port_every_s=30.0 / intensity,
            slow_transfer=min(0.1, 0.01 * intensity),
            corrupt_transfer=min(0.1, 0.01 * intensity),
            lose_acknowledgement=min(0.1, 0.01 * intensity),
            damage_artifact=min(0.1, 0.02 * intensity),
            equal_bytes=min(0.5, 0.2 * intensity),
            slow_bring=min(0.2, 0.05 * intensity),
            bring_fails=min(0.2, 0.04 * intensity),
            damage_memory=min(0.1, 0.03 * intensity),
            write_fails=min(0.1, 0.03 * intensity),
            resume_fails=min(0.1, 0.03 * intensity),
            engine_hangs=min(0.05, 0.01 * intensity),
            move_fails=min(0.2, 0.05 * intensity),
            move_hangs=min(0.05, 0.01 * intensity),
        )


class FaultLog:
    """Counts the faults that really fired: a storm in which nothing happened proves nothing."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self.faults = faults
        self.fired: dict[str, int] = {}
        self.calm = False
        """No further fault strikes."""
        self._random = random

    def strikes(self, what: str, probability: float, now: float) -> bool:
        """Draws whether a fault of this probability fires now, and counts it."""
        if probability <= 0.0 or self.calm or now > self.faults.until_s or self._random.random() >= probability:
            return False
        self.count(what)
        return True

    def count(self, what: str) -> None:
        self.fired[what] = self.fired.get(what, 0) + 1
