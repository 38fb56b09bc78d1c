"""`[pool]`."""

from __future__ import annotations

from penstock.records.section import NonNegative, NonNegativeFloat, Seconds, Section


class PoolSection(Section):
    """Devices that pipelines share, and all times of the pool. The defaults suit engines that wake within seconds."""

    devices: NonNegative = 0
    """Devices shared by all pipelines: CPU slots, or GPUs where there are any. 0 gives every process its own."""
    payback: NonNegativeFloat = 13.5
    """A worker is woken beyond its pipeline's equal part only for this multiple of the work lost while it wakes.
    Half of that time a place where others train must be free; twice that time a pipeline must be below its share before
    busy workers change hands. Lower makes better use of the devices, higher moves less."""
    turn_s: Seconds = 10.0
    """How long a woken worker is safe from other pipelines' generation (times its pipeline's weight)."""
    patience_s: Seconds = 30.0
    """A request that waited this long is no longer overtaken by later ones of its class."""
    wake_s: Seconds = 60.0
    """What a worker gets to wake, beside what its pipeline's engine needs to start."""
    drain_s: Seconds = 30.0
    """What a worker gets to finish running samples when devices move between generators."""
    sleep_s: Seconds = 30.0
    """What it gets to release its devices and prove it, after the drain."""
    report_s: Seconds = 10.0
    """What an order and its answer may take to travel."""
    fence_s: Seconds = 15.0
    """How long the host has to end a fenced process and say so, before its devices are given on regardless."""
    demand_lease_s: Seconds = 300.0
    """Served, but no sample completed for this long: the pipeline is worth one worker until it is heard of again."""
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
