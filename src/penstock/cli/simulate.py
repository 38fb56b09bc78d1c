"""`penstock simulate`: the real control machines on virtual time, with faults if asked for."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from penstock.sim.faults import Faults
from penstock.sim.world import SimReport, SimSettings, simulate


def simulate_command(
    *, steps: int, workers: int, groups_per_step: int, group_size: int, max_staleness: int, faults: float, seed: int
) -> int:
    """Raises when a promise of the control plane is broken; the settings reproduce it exactly."""
    settings = SimSettings(
        steps=steps,
        workers=workers,
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_staleness=max_staleness,
        faults=Faults.everything(faults) if faults > 0 else Faults(),
        seed=seed,
    )
    began = time.perf_counter()
    report = simulate(settings)
    _print(report, time.perf_counter() - began)
    return 0


def _print(report: SimReport, real_s: float) -> None:
    table = Table(show_header=False, title=f"{report.steps} steps, seed {report.seed}", title_justify="left")
    rows = {
        "time": f"{report.virtual_s:,.1f} s of virtual time in {real_s:.2f} s ({report.steps / real_s:,.0f} steps/s)",
        "events": f"{report.events:,}, of which {report.revisions:,} changed the state",
        "samples trained": f"{report.samples_trained:,} ({report.samples_per_s:,.0f} per virtual second)",
        "busy": f"trainer {report.trainer_busy:.0%}, workers {report.workers_busy:.0%}",
        "staleness": _counts({str(key): count for key, count in report.staleness.items()}),
        "dropped": _counts(report.dropped),
        "prompts set aside": str(report.set_aside),
        "faults fired": _counts(report.faults),
        "controller restarts": str(report.controller_restarts),
        "invariants": f"held, audited {report.audits} times",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "none"
