"""`penstock simulate`: the real processes of a run on virtual time, with faults if requested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.runtime.terminal import escape_controls

if TYPE_CHECKING:
    from penstock.launch.simulated import Report, Result


def storms_command(shape: dict[str, Any], *, faults: float | None, seeds: int) -> int:
    """Runs one seed after the other; the first that fails is minimised and printed as a test.

    If `faults` is None, the seed also determines the shape of the run.
    """
    from penstock.launch import simulated

    console = Console()
    plan = simulated.Plan(**shape, settings={"pool.devices": shape["workers"]} if shape["pipelines"] > 1 else {})
    for seed in range(plan.seed, plan.seed + seeds):
        stormy = simulated.mixed(seed) if faults is None else simulated.stormy(plan, seed, faults)
        with console.status(f"simulating seed {seed}"):  # shown in a terminal only
            failure, report = simulated.attempted(stormy)
        if failure:
            console.print(f"seed {seed} fails: {escape(failure)}", style="red")
            with console.status("searching for a smaller failing run"):
                smaller = simulated.minimised(stormy)
            console.print("The smallest failing run found, as a test:\n")
            console.print(escape(simulated.as_test(smaller, f"seed_{seed}")), soft_wrap=True)
            return 1
        assert report is not None
        if seeds == 1:
            console.print(_table(report))
        else:
            pace = f"{report.virtual_s:.0f} s in {report.real_s:.1f} s"
            ended = "" if report.complete else f", ended: {escape(report.ended)}"
            faults_fired = sum(report.fired.values())
            console.print(f"seed {seed}: {pace}, {faults_fired} faults, history {report.digest[:16]}{ended}")
    return 0


def scenario_command(name: str) -> int:
    """Runs a scenario by its name, all scenarios, or those of a user's file."""
    from penstock.launch import simulated

    console, code = Console(), 0
    for scenario in simulated.scenarios_called(name):
        with console.status(f"simulating {scenario.name}"):
            result = simulated.run_scenario(scenario)
        code = max(code, int(bool(result.problem)))
        console.print(_result_text(result))
    return code


def list_command() -> int:
    from penstock.launch import simulated

    table = Table("scenario", "elsewhere", "here", title="penstock simulate --scenario NAME", title_justify="left")
    for scenario in simulated.scenarios_called("all"):
        table.add_row(scenario.name, escape(scenario.elsewhere), escape(scenario.here))
    Console().print(table)
    return 0


def capacity_command(config: Path, run: Path | None, picture: Path) -> int:
    """Predicts the throughput of a configuration, and with one more worker or a larger staleness bound."""
    from penstock.launch import simulated

    console = Console()
    with console.status("simulating"):
        found = simulated.capacity(config, run)
    for one in found:
        columns = ("samples/s", "", "limited by", "trainer\nidle", "workers\nidle", "all\nidle", "staleness")
        table = Table("", *columns, title=escape(one.pipeline), title_justify="left", box=None, pad_edge=False)
        for name, point in (
            ("as configured", one.configured),
            ("one worker more", one.one_more_worker),
            (f"staleness ≤ {one.larger_bound.max_staleness}", one.larger_bound),
        ):
            change = point.samples_per_s / one.configured.samples_per_s - 1
            table.add_row(
                name,
                f"{point.samples_per_s:.1f}",
                "" if point is one.configured else f"{change:+.0%}",
                point.bottleneck,
                f"{point.trainer_idle:.0%}",
                f"{point.workers_idle:.0%}",
                f"{point.idle:.0%}",
                f"{point.staleness:.2f}",
            )
        console.print(table)
        if one.measured is not None:
            console.print(f"measured in the run of these durations: {one.measured:.1f} samples/s")
    simulated.plot_capacity(found, picture)
    console.print(f"plot: {escape(str(picture))}")
    return 0


def replay_command(run: Path, until_s: float | None) -> int:
    """Replays the journal of a run through the controller's state machines."""
    from penstock.sim.replay import replay_run

    console = Console()
    result = replay_run(run, until_s)
    console.print(f"{result.events:,} events over {result.took_s:,.1f} s, {result.decisions:,} decisions compared")
    fields = ("phase", "step", "version", "prompts_issued", "in_flight", "workers_alive", "trainer_alive")
    for name, status in result.status.items():
        console.print(_plain(f"{name}: " + ", ".join(f"{field} {status[field]}" for field in fields)))
        console.print(_plain(f"{name}: {result.diagnosis[name]}"))
    if result.problem:
        console.print(_plain(result.problem), style="red")
    return int(bool(result.problem))


def _plain(text: str) -> str:
    """A text of a run without markup and control characters."""
    return escape(escape_controls(text))


def _table(report: Report) -> Table:
    steps = sum(map(len, report.steps.values()))
    table = Table(show_header=False, title=f"{steps} steps, seed {report.plan.seed}", title_justify="left")
    rows = {
        "time": f"{report.virtual_s:,.1f} s of virtual time in {report.real_s:.2f} s",
        "processes started": f"{report.restarts}",
        "calls": f"{report.calls:,}",
        "samples trained": f"{report.samples:,} ({report.samples / report.virtual_s:.1f} per virtual second)",
        "staleness": _counts({str(age): count for age, count in report.staleness.items()}),
        "faults": _counts(report.fired),
        "invariants": "held",
        "ended": escape(report.ended),
        "lost by a lying disk": escape(", ".join(report.lost)) or "nothing",
        "history": report.digest,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _result_text(result: Result) -> str:
    scenario = result.scenario
    lines = [f"[bold]{scenario.name}[/bold]"]
    if scenario.elsewhere:
        lines.append(f"  elsewhere  {escape(scenario.elsewhere)}")
    lines += [f"  fault      {escape(str(one))}" for one in scenario.plan.faults]
    lines.append(f"  here       {escape(scenario.here)}")
    if result.said_after_s is not None:
        lines.append(f"  reported   after {result.said_after_s:.1f} s: {escape(result.line[:300])}")
    lines.append(f"  ended      {escape(result.report.ended[:300])} at {result.report.virtual_s:.0f} s")
    if result.problem:
        lines.append(f"  [red]problem    {escape(result.problem)}[/red]")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "none"
