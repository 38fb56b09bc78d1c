"""The `penstock` command. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import __version__
from penstock.errors import ConfigError, PenstockError, sentence_of
from penstock.runtime.terminal import escape_controls, protect_streams

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement-learning post-training: exact, bounded, and never silent."""


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set pipeline.letters.steps=10"),
]


Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that a run names although another user made the run.")
]


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A .toml configuration.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the interrupted run in this directory.")] = None,
    launcher: Annotated[str | None, typer.Option(help="local or ray: sets launch.kind.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and start nothing.")] = False,
    trust: Trust = False,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Stop when this parent process ends.")] = None,
) -> None:
    """Train: start a run, show its progress, print a summary."""
    from penstock.launch import preload

    early = preload.start() if preload.possible() and not dry_run and launcher != "ray" else None
    with early or contextlib.nullcontext():
        from penstock.cli.run import run_command

        chosen = [f"launch.kind={launcher}"] if launcher else []
        changes = [*(overrides or []), *chosen]
        raise typer.Exit(
            run_command(config, changes, resume=resume, dry_run=dry_run, trusts=trust, parent=parent, preloading=early)
        )


@app.command()
def slurm(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A .toml configuration.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the job; above 1 it starts a Ray cluster.")] = 1,
    time: Annotated[str, typer.Option(help="Time limit of the job, in Slurm's format.")] = "1-00:00:00",
    option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Further options of sbatch, e.g. --gpus-per-node=8")
    ] = None,
    trust: Trust = False,
) -> None:
    """Print a batch script for Slurm that resumes its run.

    Submit it with `penstock slurm CONFIG | sbatch`. A requeued job resumes its run.
    """
    from penstock.cli.run import slurm_command

    chosen = {"nodes": nodes, "time": time, "options": option or []}
    raise typer.Exit(slurm_command(config, overrides or [], **chosen, trusts=trust))


@app.command()
def init(
    template: Annotated[str, typer.Argument(metavar="[letters|chat|gym|agent]", help="The template.")] = "letters",
    to: Annotated[Path, typer.Option(metavar="DIR", help="Target; the current directory by default.")] = Path(),
) -> None:
    """Write a small commented project to start from."""
    from penstock.cli.init import init_command

    raise typer.Exit(init_command(template, to))


@app.command()
def attach(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run on Ray.")],
    stop: Annotated[bool, typer.Option("--stop", help="Stop it gracefully and show its end.")] = False,
    trust: Trust = False,
) -> None:
    """Watch a run on Ray from any terminal of the cluster.

    Ctrl-C leaves it running.
    """
    from penstock.cli.run import attach_command

    raise typer.Exit(attach_command(run_dir, stop=stop, trusts=trust))


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A .toml configuration.")],
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Validate a configuration; print it with every default."""
    from penstock.cli.run import check_command

    raise typer.Exit(check_command(config, overrides or [], trusts=trust))


@app.command()
def keys(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A table or a key, e.g. rollout or train.max_staleness; none: all.")
    ] = "",
) -> None:
    """Explain the keys of a configuration, with their defaults."""
    from penstock.cli.run import keys_command

    raise typer.Exit(keys_command(key))


@app.command()
def story(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    subject: Annotated[
        str, typer.Argument(metavar="ID", help="sample:17, prompt:3, step:5 or version:6; a bare number is a sample.")
    ],
    pipeline: Annotated[str | None, typer.Option(help="Needed when the run has several pipelines.")] = None,
) -> None:
    """Print the history of a sample, a prompt, a step or a version."""
    from penstock.cli.inspect import story_command

    raise typer.Exit(story_command(run_dir, subject, pipeline))


@app.command()
def doctor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    at: Annotated[float | None, typer.Option(help="Seconds after its start: read from the journal.")] = None,
) -> None:
    """Show what each part of a live run waits for, and how long."""
    from penstock.cli.inspect import doctor_command

    raise typer.Exit(doctor_command(run_dir, at))


@app.command()
def publish(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    to: Annotated[str, typer.Option(help="tensorboard, wandb or trackio.")],
    trust: Trust = False,
) -> None:
    """Send the metrics of a run to a sink.

    Lines that the sink already has are not sent again.
    """
    from penstock.cli.inspect import publish_command

    raise typer.Exit(publish_command(run_dir, to, trusts=trust))


Step = Annotated[str, typer.Option(help="A step that is still on disk, or best; the last one by default.")]
Pipeline = Annotated[str | None, typer.Option(help="Needed when the run has several pipelines.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")]
NewTokens = Annotated[int | None, typer.Option(min=1, help="Longest completion; as in training by default.")]


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Step = "",
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Target; exports/RUN-PIPELINE-STEP by default.")
    ] = None,
    pipeline: Pipeline = None,
    merged: Annotated[bool, typer.Option("--merged", help="Of a LoRA run: the base with merged adapter.")] = False,
) -> None:
    """Write a checkpoint as a directory that transformers opens.

    For a LoRA run it contains the adapter, unless --merged is given.
    """
    from penstock.cli.after import export_command

    raise typer.Exit(export_command(run_dir, pipeline=pipeline, step=step, to=to, merged=merged))


@app.command("eval")
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run directory, or the directory of a model.")],
    env: Annotated[str | None, typer.Option(help="An environment as in env.name; the run's by default.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of --env.")] = None,
    step: Step = "",
    pipeline: Pipeline = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number; evaluation.prompts by default.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    temperature: Temperature = 0.0,
    max_new_tokens: NewTokens = None,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A key of another engine, such as kind=...")
    ] = None,
    trust: Trust = False,
) -> None:
    """Measure a checkpoint or a model on held-out prompts.

    Prints the mean reward and its 95 % confidence interval.
    """
    from penstock.cli.after import eval_command

    code = eval_command(
        path,
        env=env,
        options=option or [],
        pipeline=pipeline,
        step=step,
        prompts=prompts,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        engine=engine or [],
        trusts=trust,
    )
    raise typer.Exit(code)


@app.command()
def sample(
    path: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run directory, or the directory of a model.")],
    prompt: Annotated[str, typer.Argument(help="A text; sent as a user message if the model has a chat template.")],
    step: Step = "",
    pipeline: Pipeline = None,
    count: Annotated[int, typer.Option(min=1, help="Number of completions.")] = 1,
    temperature: Temperature = 1.0,
    max_new_tokens: NewTokens = None,
) -> None:
    """Generate completions of a prompt with a checkpoint."""
    from penstock.cli.after import sample_command

    code = sample_command(
        path,
        prompt,
        pipeline=pipeline,
        step=step,
        count=count,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    raise typer.Exit(code)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    to: Annotated[Path | None, typer.Option(metavar="FILE.html", help="RUN/report.html by default.")] = None,
) -> None:
    """Write a run as one HTML file to send to a colleague."""
    from penstock.cli.after import report_command

    raise typer.Exit(report_command(run_dir, to))


@app.command()
def dashboard(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a folder of them.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than loopback exposes the run to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose a free port.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the run as one file to share, and exit.")
    ] = None,
) -> None:
    """Show runs in a browser: live, finished or dead."""
    from penstock.cli.dashboard import dashboard_command

    raise typer.Exit(dashboard_command(path, host=host, port=port, open_browser=open_browser, export_to=export))


@app.command()
def simulate(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="With --capacity: the configuration.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same history.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, run one after the other.")] = 1,
    faults: Annotated[float, typer.Option(min=0, help="Intensity of faults: 0 for none, 1 for a storm.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 40,
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers of each pipeline.")] = 2,
    pipelines: Annotated[int, typer.Option(min=1, help="Pipelines; above 1 they share a pool of devices.")] = 1,
    groups_per_step: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 2,
    max_staleness: Annotated[int, typer.Option(min=0, help="The staleness bound.")] = 2,
    mixed: Annotated[bool, typer.Option("--mixed", help="Random runs and random faults, by seed.")] = False,
    scenario: Annotated[str | None, typer.Option(help="A failure by name, `all`, or your .py or .toml file.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
    capacity: Annotated[bool, typer.Option("--capacity", help="Predict the throughput of CONFIG.")] = False,
    from_: Annotated[Path | None, typer.Option("--from", help="With --capacity: a run to take durations from.")] = None,
    plot: Annotated[Path, typer.Option(help="With --capacity: file of the plot.")] = Path("capacity.png"),
) -> None:
    """Run the real loops on virtual time, with faults.

    A failing seed is minimised and printed as a test.
    """
    from penstock.cli import simulate as commands

    if list_:
        raise typer.Exit(commands.list_command())
    if scenario is not None:
        raise typer.Exit(commands.scenario_command(scenario))
    if capacity:
        if config is None:
            raise ConfigError("--capacity needs a configuration: penstock simulate CONFIG --capacity")
        raise typer.Exit(commands.capacity_command(config, from_, plot))
    if config is not None:
        raise ConfigError(f"a simulation takes no configuration; --capacity predicts the throughput of {config}")
    shape = {
        "seed": seed,
        "steps": steps,
        "workers": workers,
        "pipelines": pipelines,
        "groups_per_step": groups_per_step,
        "group_size": group_size,
        "max_staleness": max_staleness,
    }
    raise typer.Exit(commands.storms_command(shape, faults=None if mixed else faults, seeds=seeds))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    until: Annotated[float | None, typer.Option(help="Show the state this many seconds after the first event.")] = None,
) -> None:
    """Replay a run's journal and compare every decision."""
    from penstock.cli.simulate import replay_command

    raise typer.Exit(replay_command(run_dir, until))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a benchmark; without it, all are listed.")] = None,
) -> None:
    """Run a benchmark; compare with a peer or a physical limit.

    The benchmark receives further options: --quick, --json FILE and those of `penstock bench NAME -- --help`.
    """
    from penstock.cli.bench import bench_command

    raise typer.Exit(bench_command(name, context.args))


def main() -> None:
    """Entry point: an error becomes one sentence on stderr and an exit code."""
    protect_streams()
    try:
        app()
    except PenstockError as error:
        typer.echo(f"penstock: {escape_controls(str(error))}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        typer.echo(f"penstock: {escape_controls(sentence_of(error))}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
