"""What sharing one pool is worth, in simulation: samples, moves, idle devices and fairness under four regimes.

Two mixes. *alternating*: on-policy rounds of generation, training and time off the devices; here sharing must pay in
samples. *continuous*: generation round after round while training happens elsewhere; here nothing needs to move, and
the number of moves shows what a rule does to itself. The peer for samples is the same mix on disjoint static pools; the
peer for moves is the plain gap-ratio rule.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.sim.pool_world import Mix, Outcome, Regime, simulate

SIZES = ((2, 4), (4, 16), (8, 64), (16, 64), (64, 512), (256, 4096))
QUICK_SIZES = SIZES[:3]
COLUMNS = ("regime", "samples", "s/round", "moves/round", "busy", "moving", "idle", "even", "wait s", "cpu s")
REGIMES: tuple[Regime, ...] = ("disjoint", "colocated", "plain", "shared")


def mixes(pipelines: int, devices: int) -> dict[str, Mix]:
    # Fewer virtual seconds where there are more devices: the number of samples is what costs real time.
    scale = 1.0 if devices <= 64 else 0.5 if devices <= 512 else 0.25
    alternating = Mix(pipelines=pipelines, devices=devices, horizon_s=2400.0 * scale)
    continuous = Mix(
        pipelines=pipelines, devices=devices, horizon_s=1200.0 * scale, train_s=0.0, apart_s=0.0, stagger_s=17.0
    )
    return {"alternating": alternating, "continuous": continuous}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sharing", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small pools only")
    parser.add_argument("--largest", type=int, default=4096, help="leave out pools with more devices than this")
    options = parser.parse_args(argv)
    console = Console(width=120)
    figures = []
    for pipelines, devices in QUICK_SIZES if options.quick else SIZES:
        if devices > options.largest:
            continue
        for mix_name, mix in mixes(pipelines, devices).items():
            outcomes: dict[Regime, Outcome] = {}
            table = Table(title=f"{mix_name}, {pipelines} pipelines on {devices} devices, {mix.horizon_s:.0f} s")
            for column in (
                "regime",
                "samples",
                "s/round",
                "moves/round",
                "busy",
                "moving",
                "idle",
                "even",
                "wait s",
                "cpu s",
            ):
                table.add_column(column, justify="left" if column == "regime" else "right")
            for regime in REGIMES:
                if mix_name == "continuous" and regime in ("disjoint", "colocated"):
                    continue  # with no training to make room for, every part is simply busy
                began = time.thread_time()
                outcome = outcomes[regime] = simulate(mix, regime)
                table.add_row(
                    regime,
                    str(outcome.samples),
                    f"{outcome.step_s:.0f}",
                    f"{outcome.moves_per_round:.1f}",
                    f"{outcome.generating + outcome.training:.0%}",
                    f"{outcome.moving:.1%}",
                    f"{outcome.idle:.0%}",
                    f"{outcome.fairness:.3f}",
                    f"{outcome.longest_wait_s:.0f}",
                    f"{time.thread_time() - began:.1f}",
                )
            console.print(table)
            shared, plain = outcomes["shared"], outcomes["plain"]
            compared: list[tuple[str, str, float, float]] = [
                ("samples", regime, shared.samples, outcome.samples)
                for regime, outcome in outcomes.items()
                if regime != "shared"
            ]
            compared.append(("moves per round", "plain", shared.moves_per_round, plain.moves_per_round))
            for unit, regime, ours, peer in compared:
                ratio = ours / peer
                console.print(f"  {unit} against {regime}: {ratio:.2f}x")
                name = f"{mix_name} {pipelines}x{devices} {unit}"
                figures.append(
                    {"name": name, "unit": unit, "ours": ours, "peer": peer, "peer_name": regime, "ratio": ratio}
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
