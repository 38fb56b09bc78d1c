"""What sharing one pool is worth, simulated: samples, moves, idle devices and fairness, several seeds each.

Two mixes. *alternating*: on-policy rounds of generation, training and time off the devices; here sharing must pay in
samples. *continuous*: generation round after round while training happens elsewhere; here nothing needs to move, and
the number of moves shows what a rule does to itself. Regimes: `disjoint` and `colocated` are static pools (a pipeline's
part split between training and generation, or used for both in turn), `plain` is the gap-ratio rule without move cost
and hysteresis, `shared` is ours. The ratio to quote is the one to the strongest of the others, which is named. All of
it is simulated: no GPU took part. All pipelines have started, and the cold start is over, before the counting begins.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from _models import spread
from penstock.sim.pool_world import Mix, Outcome, Regime, fewest_moves, simulate

SIZES = ((2, 4), (4, 16), (8, 64), (16, 64), (64, 512), (256, 4096))
REGIMES: tuple[Regime, ...] = ("disjoint", "colocated", "plain", "shared")
TARGET = 1.5
COLUMNS = ("regime", "samples", "s/round", "moves/round", "busy", "moving", "idle", "even", "longest wait s")


def mixes(pipelines: int, devices: int) -> dict[str, Mix]:
    # Fewer virtual seconds where there are more devices: the number of samples is what costs real time.
    horizon_s = 1800.0 if devices <= 64 else 900.0 if devices <= 512 else 450.0
    alternating = Mix(pipelines=pipelines, devices=devices, horizon_s=horizon_s)
    continuous = msgspec.structs.replace(alternating, train_s=0.0, apart_s=0.0, stagger_s=17.0)
    return {"alternating": alternating, "continuous": continuous}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sharing", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small pools and two seeds only")
    parser.add_argument("--seeds", type=int, default=5, help="seeds for pools of up to 64 devices; one for larger ones")
    parser.add_argument("--smallest", type=int, default=0, help="leave out pools with fewer devices than this")
    parser.add_argument("--largest", type=int, default=4096, help="leave out pools with more devices than this")
    options = parser.parse_args(argv)
    console = Console(width=120)
    figures: list[dict[str, str | float]] = []
    for pipelines, devices in SIZES[:3] if options.quick else SIZES:
        if not options.smallest <= devices <= options.largest:
            continue
        seeds = 1 if devices > 64 else min(2, options.seeds) if options.quick else options.seeds
        for name, mix in mixes(pipelines, devices).items():
            outcomes: dict[Regime, list[Outcome]] = {}
            for regime in REGIMES:
                if name == "continuous" and regime in ("disjoint", "colocated"):
                    continue  # with no training to make room for, every part is simply busy
                outcomes[regime] = [simulate(msgspec.structs.replace(mix, seed=seed), regime) for seed in range(seeds)]
            title = f"{name}, {pipelines} pipelines on {devices} devices, {mix.horizon_s:.0f} s, {seeds} seeds"
            console.print(_table(title, outcomes))
            figures += _compare(f"{name} {pipelines}x{devices}", outcomes, console)
            if name == "alternating":
                plain_moves = statistics.mean(outcome.moves_per_round for outcome in outcomes["plain"])
                round_s = statistics.mean(outcome.step_s for outcome in outcomes["disjoint"]) / TARGET
                bound = fewest_moves(mix, round_s)
                console.print(
                    f"  no schedule {TARGET} times as fast as disjoint pools ({round_s:.0f} s a round) has fewer than "
                    f"{bound:.1f} moves a round: {bound / plain_moves:.2f}x of the plain rule's"
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


def _table(title: str, outcomes: dict[Regime, list[Outcome]]) -> Table:
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "regime" else "right")
    for label, seeds in outcomes.items():
        table.add_row(
            label,
            _spread([outcome.samples for outcome in seeds], ".0f"),
            _spread([outcome.step_s for outcome in seeds], ".0f"),
            _spread([outcome.moves_per_round for outcome in seeds], ".1f"),
            f"{statistics.mean(outcome.generating + outcome.training for outcome in seeds):.0%}",
            f"{statistics.mean(outcome.moving for outcome in seeds):.1%}",
            f"{statistics.mean(outcome.idle for outcome in seeds):.0%}",
            f"{min(outcome.fairness for outcome in seeds):.3f}",
            f"{max(outcome.longest_wait_s for outcome in seeds):.0f}",
        )
    return table


def _compare(name: str, outcomes: dict[Regime, list[Outcome]], console: Console) -> list[dict[str, str | float]]:
    """Ratios of ours to the others, seed by seed."""
    figures: list[dict[str, str | float]] = []
    others: list[Regime] = [regime for regime in outcomes if regime != "shared"]
    best = max(others, key=lambda regime: statistics.median(outcome.samples for outcome in outcomes[regime]))
    pairs: list[tuple[Regime, str]] = [*((regime, "samples") for regime in others), ("plain", "moves_per_round")]
    for peer, unit in pairs:
        mine = [getattr(outcome, unit) for outcome in outcomes["shared"]]
        theirs = [getattr(outcome, unit) for outcome in outcomes[peer]]
        ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
        words = unit.replace("_", " ")
        strongest = " (the strongest other)" if (peer, unit) == (best, "samples") and len(others) > 1 else ""
        console.print(f"  {words} against {peer}{strongest}: {_spread(ratios, '.2f')}x")
        figures.append(
            {
                "name": f"{name} {words}",
                "unit": words,
                "ours": statistics.median(mine),
                "peer": statistics.median(theirs),
                "peer_name": f"{peer}, simulated",
                "ratio": statistics.median(ratios),
                "least_ratio": min(ratios),
                "most_ratio": max(ratios),
            }
        )
    return figures


def _spread(values: list[float], form: str) -> str:
    """The median, and least to most over the seeds."""
    return spread(values, form)


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
