"""`penstock simulate`: the real machines on virtual time, with faults if asked for."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.control.points import EvaluationSettings
from penstock.errors import ConfigError, PenstockError
from penstock.sim.faults import Faults, WholeFaults
from penstock.sim.whole import WholeReport, WholeSettings, simulate_whole
from penstock.sim.world import SimReport, SimSettings, simulate

CONTROL = "ledger, admission, membership, phases, evaluation"
EVERYTHING = f"{CONTROL}; prefetch; replicas, transaction; slots, exchange, ports, retries; pool"


def simulate_command(
    *,
    steps: int,
    workers: int,
    groups_per_step: int,
    group_size: int,
    max_staleness: int,
    faults: float,
    seed: int,
    whole: bool = False,
    pipelines: int = 1,
) -> int:
    """Raises when a promise is broken or the run does not end, naming the seed: it fails again in the same way."""
    shape: dict[str, Any] = {
        "steps": steps,
        "workers": workers,
        "groups_per_step": groups_per_step,
        "group_size": group_size,
        "max_staleness": max_staleness,
        "seed": seed,
        "evaluation": EvaluationSettings(every=max(1, steps // 10), prompts=16, samples=2),
    }
    if pipelines > 1 and not whole:
        raise ConfigError("--pipelines above 1 needs --whole: without it there is one pipeline and no pool")
    console = Console()
    began = time.perf_counter()
    try:
        with console.status(f"simulating {steps} steps"):  # shown in a terminal only
            if whole:
                storm = WholeFaults.everything(faults) if faults > 0 else WholeFaults()
                report = simulate_whole(WholeSettings(**shape, pipelines=pipelines, check_every=50, faults=storm))
                rows = _whole_rows(report)
            else:
                storm = Faults.everything(faults) if faults > 0 else Faults()
                report = simulate(SimSettings(**shape, faults=storm))
                rows = _plain_rows(report)
    except PenstockError as error:
        raise type(error)(f"seed {seed} (faults {faults:g}{', whole' if whole else ''}): {error.message}") from error
    real_s = time.perf_counter() - began
    pace = f"{report.virtual_s:,.1f} s of virtual time in {real_s:.2f} s ({report.steps / real_s:,.0f} steps/s)"
    table = Table(show_header=False, title=f"{report.steps} steps, seed {report.seed}", title_justify="left")
    for name, value in ({"time": pace} | rows).items():
        table.add_row(name, value)
    console.print(table)
    return 0


def _plain_rows(report: SimReport) -> dict[str, str]:
    return {
        "machines": CONTROL,
        "events": f"{report.events:,}, of which {report.revisions:,} changed the state",
        "samples trained": f"{report.samples_trained:,} ({report.samples_per_s:,.0f} per virtual second)",
        "busy": f"trainer {report.trainer_busy:.0%}, workers {report.workers_busy:.0%}",
        **_common_rows(report),
        "invariants": f"held, audited {report.audits + 1} times",
    }


def _whole_rows(report: WholeReport) -> dict[str, str]:
    return {
        "machines": EVERYTHING,
        "pipelines": f"{report.pipelines} on one pool, {report.moves:,} wakes and sleeps ordered",
        "turns of trainers": ", ".join(f"{count:,} {name}" for name, count in report.turns.items())
        + f"; {report.promises_withdrawn:,} promises passed to a higher class",
        "events": f"{report.events:,}",
        "samples trained": f"{report.samples_trained:,}",
        "weights": f"{report.weight_updates:,} updates since the controller's last start",
        **_common_rows(report),
        "invariants": f"held: books audited {report.audits + report.pipelines:,} times, "
        f"engines looked into {report.decode_looks:,} times, {report.payloads_read:,} payloads read; no slot leaked, "
        "no replica left behind",
    }


def _common_rows(report: SimReport | WholeReport) -> dict[str, str]:
    return {
        "staleness": _counts({str(key): count for key, count in report.staleness.items()}),
        "dropped": _counts(report.dropped),
        "prompts set aside": str(report.set_aside),
        "faults fired": _counts(report.faults),
        "evaluations": f"{report.evaluated:,} versions; skipped {_counts(report.evaluations_skipped)}",
        "controller restarts": str(report.controller_restarts),
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "none"
