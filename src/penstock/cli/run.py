"""`penstock run` and `penstock check`."""

from __future__ import annotations

import logging
from pathlib import Path

import typer
import uvloop
from rich.console import Console

import penstock
from penstock.config.check import check_environment
from penstock.config.load import dump, load
from penstock.config.run import Config
from penstock.errors import ConfigError, PenstockError
from penstock.launch.local import LocalPlacer
from penstock.launch.summary import print_summary
from penstock.launch.supervisor import Outcome, Supervisor, exclusive
from penstock.launch.view import PlainView, TerminalView
from penstock.runtime.logs import configure
from penstock.runtime.rundir import Ending, RunDir, write_atomically
from penstock.runtime.shutdown import ShutdownSignal

log = logging.getLogger(__name__)

INTERRUPTED = 130


def check_command(config: Path, overrides: list[str]) -> int:
    resolved = load(config, overrides)
    check_environment(resolved)
    typer.echo(dump(resolved), nl=False)
    return 0


def run_command(config: Path | None, overrides: list[str], *, resume: Path | None, dry_run: bool) -> int:
    resolved, run = _prepare(config, overrides, resume, dry_run)
    if run is None:
        typer.echo(dump(resolved), nl=False)
        return 0
    console = Console()
    with exclusive(run):
        configure("supervisor", run.log_path("supervisor"), logging.INFO)
        console.print(f"run directory: {run.root}", highlight=False, soft_wrap=True)
        outcome = _run_to_its_end(run, resolved, console)
    ended = "interrupted" if outcome.interrupted else "complete"
    print_summary(console, run, outcome.status, wall_s=outcome.wall_s, ended=ended)
    if outcome.interrupted:
        console.print(f"go on with: penstock run --resume {run.root}", highlight=False, soft_wrap=True)
        return INTERRUPTED
    return 0


def _run_to_its_end(run: RunDir, config: Config, console: Console) -> Outcome:
    """How it ended is also written down, for whoever looks at the directory later."""
    run.ending_path.unlink(missing_ok=True)
    try:
        outcome = uvloop.run(_supervise(run, config, console))
    except PenstockError as error:
        _write_ending(run, "failed", error.message)
        raise
    _write_ending(run, "interrupted" if outcome.interrupted else "complete")
    return outcome


def _write_ending(run: RunDir, how: Ending, sentence: str = "") -> None:
    try:
        run.write_ending(how, sentence)
    except OSError as error:  # a full disk, say: the terminal says it all the same
        log.warning("how the run ended could not be written down: %s", error)


def _prepare(
    config: Path | None, overrides: list[str], resume: Path | None, dry_run: bool
) -> tuple[Config, RunDir | None]:
    if (config is None) == (resume is None):
        raise ConfigError("give either a configuration to start or --resume RUN_DIR to go on with, one of the two")
    if resume is not None:
        run = RunDir.open(resume)
        resolved = load(run.config_path, overrides)
        check_environment(resolved)
        if dry_run:
            return resolved, None
        write_atomically(run.config_path, dump(resolved))
        return resolved, run
    assert config is not None
    resolved = load(config, overrides)
    check_environment(resolved)
    if dry_run:
        return resolved, None
    return resolved, RunDir.create(resolved.run.dir, resolved.run.name, dump(resolved), penstock.__version__)


async def _supervise(run: RunDir, config: Config, console: Console) -> Outcome:
    view = TerminalView(console, str(run.root)) if console.is_terminal else PlainView(console)
    stop = ShutdownSignal()
    stop.install()
    return await Supervisor(run, config, LocalPlacer(run, config), view, stop).run()
