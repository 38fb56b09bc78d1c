"""How many workers a pipeline needs, and what a staleness bound costs, answered before buying anything."""

from __future__ import annotations

import msgspec

from penstock.sim.world import SimSettings, simulate


class CapacityPoint(msgspec.Struct, frozen=True):
    """One simulated configuration beside what it could reach at best."""

    workers: int
    max_staleness: int
    samples_per_s: float
    limit_per_s: float
    """The slower of all workers generating without a pause and the trainer training without a pause."""
    trainer_busy: float
    workers_busy: float
    outdated: float
    """Share of the generated samples thrown away because they had become too old."""

    @property
    def efficiency(self) -> float:
        return self.samples_per_s / self.limit_per_s


def limit_per_s(settings: SimSettings) -> float:
    """Samples per virtual second that no scheduling could exceed."""
    pace = settings.pace
    generated = settings.workers * settings.concurrency / pace.generate_s
    trained = settings.groups_per_step * settings.group_size / (pace.step_s + pace.publish_s)
    return min(generated, trained)


def sweep(settings: SimSettings, workers: list[int], staleness: list[int]) -> list[CapacityPoint]:
    """Simulates every combination; the seed and everything else stay the same."""
    points: list[CapacityPoint] = []
    for count in workers:
        for bound in staleness:
            chosen = msgspec.structs.replace(settings, workers=count, max_staleness=bound)
            report = simulate(chosen)
            made = report.samples_trained + sum(report.dropped.values())
            points.append(
                CapacityPoint(
                    workers=count,
                    max_staleness=bound,
                    samples_per_s=report.samples_per_s,
                    limit_per_s=limit_per_s(chosen),
                    trainer_busy=report.trainer_busy,
                    workers_busy=report.workers_busy,
                    outdated=report.dropped["outdated"] / made,
                )
            )
    return points
