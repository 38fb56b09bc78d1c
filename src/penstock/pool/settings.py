"""`[pool]`."""

from __future__ import annotations

from penstock.records.section import NonNegative, NonNegativeFloat, Seconds, Section


class PoolSection(Section):
    """Devices shared by pipelines, and all times of the pool. The defaults suit engines that wake within seconds."""

    devices: NonNegative = 0
    """Devices shared by all pipelines: CPU slots, or GPUs where there are any. 0 gives every process its own."""
    payback: NonNegativeFloat = 13.5
    """A worker is woken beyond its pipeline's equal part only for this multiple of the work lost while it wakes.
    With T = payback times the wake time: a place where others train must be free for T/2, and a pipeline must be below
    its share for 2 T before busy workers move to it. Lower uses the devices better, higher moves less."""
    turn_s: Seconds = 10.0
    """How long a woken worker is protected from other pipelines' generation (times its pipeline's weight)."""
    patience_s: Seconds = 30.0
    """A request that waited this long is not overtaken by later ones of its class."""
    wake_s: Seconds = 60.0
    """Timeout for waking a worker, in addition to the start time of its pipeline's engine."""
    drain_s: Seconds = 30.0
    """Timeout for running samples to finish when devices move between generation workers."""
    sleep_s: Seconds = 30.0
    """Timeout for releasing the devices and verifying it, after the drain."""
    report_s: Seconds = 10.0
    """Allowance for the delivery of an order and its report."""
    fence_s: Seconds = 15.0
    """Timeout for the host to end a fenced process and report it. Then its devices are reassigned in any case."""
    demand_lease_s: Seconds = 300.0
    """A pipeline whose workers complete no sample for this long gets only one worker until it completes one."""
    bench_s: Seconds = 5.0
    """Pause after a failed move; doubles with every failure in a row."""
    bench_max_s: Seconds = 300.0
    """The longest such pause."""

    def longest_wait_s(self, *, pipelines_ahead: int, heaviest: float = 1.0, start_s: float = 0.0) -> float:
        """The bound on starvation: an open pipeline with work and a live worker is ordered to wake within this time.

        `pipelines_ahead` counts those that began to wait earlier. Each of them, and then the pipeline itself, needs at
        most the waking and one turn of the workers in the way (of a pipeline of weight `heaviest`, with engines that
        start within `start_s`) and one eviction, which ends with a verified sleep or with the fence. Time in which
        training or other requests occupy the devices is not counted.
        """
        service_s = start_s + self.wake_s + self.report_s + self.turn_s * heaviest
        eviction_s = self.drain_s + self.sleep_s + self.report_s + self.fence_s
        return (pipelines_ahead + 1) * (service_s + eviction_s)
