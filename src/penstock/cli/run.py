"""`penstock run`, `attach`, `check` and `keys`."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType

import typer
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

import penstock
from penstock.cli.printing import say
from penstock.config.check import check_by_making, check_environment, check_models
from penstock.config.load import dump, load
from penstock.config.reference import keys
from penstock.config.run import Config
from penstock.engines.hub import cached, directory_of
from penstock.engines.settings import HubModel
from penstock.errors import INTERRUPTED, ConfigError, PenstockError
from penstock.launch.gpus import GpuWatch
from penstock.launch.local import LocalPlacer
from penstock.launch.preload import Preloading
from penstock.launch.slurm import batch_script
from penstock.launch.summary import plot, print_summary
from penstock.launch.supervisor import Outcome, View, configured, exclusive, supervise
from penstock.launch.view import PlainView, TerminalView
from penstock.runtime.logs import configure
from penstock.runtime.parent import stop_with_parent
from penstock.runtime.rundir import RunDir, require_own_configuration
from penstock.runtime.shutdown import ShutdownSignal
from penstock.runtime.terminal import escape_controls

PIPE_COLUMNS = 140
"""Width of output to a pipe: rich's default would wrap the cells of the summary."""


def check_command(config: Path, overrides: list[str], *, trusts: bool = False) -> int:
    require_own_configuration(config, trusts)
    resolved = load(config, overrides)
    check_environment(resolved)
    check_by_making(resolved)
    check_models(resolved)
    for model in _hub_models(resolved):
        if cached(model) is None:
            say(f"model {model.name!r} is not in the local cache: `penstock run` will download it", err=True)
    for limited in filter(None, (pipeline.limited_calls() for pipeline in resolved.pipeline)):
        say(limited, err=True)
    typer.echo(dump(resolved), nl=False)
    return 0


def keys_command(prefix: str) -> int:
    console, table = _console(), ""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for key in keys(prefix):
        if key.table != table:
            table = key.table
            grid.add_row(Text(f"\n{table}", style="bold"))
        name = key.path.rpartition(".")[2]
        grid.add_row(Text(f"  {name} = {key.default}"), Text(key.meaning))
    console.print(grid)
    return 0


def run_command(
    config: Path | None,
    overrides: list[str],
    *,
    resume: Path | None,
    dry_run: bool,
    trusts: bool = False,
    parent: int | None = None,
    preloading: Preloading | None = None,
) -> int:
    if parent is not None:
        stop_with_parent(parent)
    resolved, run = _prepare(config, overrides, resume, dry_run, trusts)
    if run is None:
        typer.echo(dump(resolved), nl=False)
        return 0
    console = _console()
    ending = run.read_ending()
    if ending is not None and ending["how"] == "complete" and not overrides:
        _print_line(console, f"{run.root} is complete: there is nothing to resume. To train longer, set more steps:")
        _print_line(console, f"penstock run --resume {run.root} --set pipeline.{resolved.pipeline[0].name}.steps=…")
        return 0
    if resume is not None:
        _download_models(resolved)
    _print_line(console, f"run directory: {run.root}")
    gpus = GpuWatch()
    try:
        with gpus:
            outcome = _run(run, resolved, console, preloading)
    except PenstockError as error:
        ending = run.read_ending() if run.in_place else None
        if ending is None or ending["how"] != "failed":  # it did not start, or there is nothing to resume
            raise
        picture = plot(run)
        drawn = [] if picture is None else [f"reward curves so far: {picture}"]
        hints = [*drawn, f"logs: {run.root}/logs", f"once fixed, resume with: penstock run --resume {run.root}"]
        raise type(error)("\n".join([error.message, *hints])) from error
    return _conclude(console, run, outcome, gpus)


def _run(run: RunDir, config: Config, console: Console, preloading: Preloading | None) -> Outcome:
    if config.launch.kind == "ray":
        return uvloop.run(ray_launcher().run_on_ray(run, config, _view(run, config, console)))
    with exclusive(run), configured(run, dump(config)), run.with_new_token():
        configure("supervisor", run.log_path("supervisor"), logging.INFO, warnings_shown=False)  # the view shows notes
        return uvloop.run(_supervise(run, config, console, preloading))


def attach_command(run_dir: Path, *, stop: bool, trusts: bool = False) -> int:
    """Shows a run on Ray, or its result if it has ended."""
    run, console = RunDir.open(run_dir), _console()
    run.require_own(trusts, "a Ray cluster that it names could run any code here")
    config = load(run.config_path)
    if config.launch.kind != "ray":
        raise ConfigError(f"{run.root} was not launched on Ray; open it with: penstock dashboard {run.root}")
    outcome = uvloop.run(ray_launcher().attach(run, _view(run, config, console), stop=stop))
    if outcome is None:
        _print_line(console, f"the run continues; attach again with: penstock attach {run.root}")
        return 0
    return _conclude(console, run, outcome)


def slurm_command(
    config: Path, overrides: list[str], *, nodes: int, time: str, options: list[str], trusts: bool
) -> int:
    require_own_configuration(config, trusts)
    resolved = load(config, overrides)
    check_environment(resolved)
    typer.echo(batch_script(config, resolved, overrides, nodes=nodes, time=time, options=options), nl=False)
    return 0


def ray_launcher() -> ModuleType:
    try:
        return importlib.import_module("penstock.launch.ray_run")
    except ModuleNotFoundError as error:
        raise ConfigError(f"runs on Ray need the extra penstock-rl[ray]: {error}") from error


def _conclude(console: Console, run: RunDir, outcome: Outcome, gpus: GpuWatch | None = None) -> int:
    ended = "interrupted" if outcome.interrupted else "complete"
    busy = gpus.busy if gpus is not None else lambda since: {}
    print_summary(console, run, outcome.status, wall_s=outcome.wall_s, ended=ended, busy=busy)
    if outcome.interrupted:
        _print_line(console, f"resume with: penstock run --resume {run.root}")
        return INTERRUPTED
    return 0


def _prepare(
    config: Path | None, overrides: list[str], resume: Path | None, dry_run: bool, trusts: bool
) -> tuple[Config, RunDir | None]:
    if (config is None) == (resume is None):
        raise ConfigError("give exactly one of the two: a configuration to start, or --resume RUN_DIR")
    if resume is not None:
        run = RunDir.open(resume)
        run.require_own(trusts, "resuming it runs the code that its configuration names")
        resolved = load(run.config_path, overrides)
        check_environment(resolved)
        if dry_run:
            check_models(resolved)
            return resolved, None
        return resolved, run
    assert config is not None
    require_own_configuration(config, trusts)
    resolved = load(config, overrides)
    check_environment(resolved)
    if resolved.launch.kind == "ray":
        ray_launcher().check(resolved)
    if dry_run:
        check_models(resolved)
        return resolved, None
    _download_models(resolved)
    return resolved, RunDir.create(resolved.run.dir, resolved.run.name, dump(resolved), penstock.__version__)


def _hub_models(config: Config) -> list[HubModel]:
    return [pipeline.model for pipeline in config.pipeline if isinstance(pipeline.model, HubModel)]


def _download_models(config: Config) -> None:
    """Once, before any process starts. A new run has no directory yet, so a failure leaves none."""
    for model in _hub_models(config):
        say(f"model {model.name}: {directory_of(model)}")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def _view(run: RunDir, config: Config, console: Console) -> View:
    shares_devices = config.pool.devices > 0
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(console, str(run.root), shares_devices=shares_devices)
    return PlainView(console, shares_devices=shares_devices)


async def _supervise(run: RunDir, config: Config, console: Console, preloading: Preloading | None) -> Outcome:
    stop = ShutdownSignal()
    stop.install()
    return await supervise(run, config, LocalPlacer(run, config, preloading), _view(run, config, console), stop)


def _print_line(console: Console, line: str) -> None:
    console.print(escape_controls(line), highlight=False, markup=False, soft_wrap=True)
