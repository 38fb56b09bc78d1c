"""`penstock story`, `doctor` and `publish`: the history of a run, its diagnosis, and its metrics sent to a sink."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.cli.printing import say, say_line
from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.journal.story import story_lines
from penstock.records.ids import PipelineName
from penstock.runtime.rundir import RunDir
from penstock.runtime.sinks import Publication

Kind = Literal["sample", "prompt", "step", "version"]


def story_command(run_dir: Path, subject: str, pipeline: str | None) -> int:
    kind, number = parse_subject(subject)
    run = RunDir.open(run_dir)
    names = [section.name for section in load(run.config_path).pipeline]
    if pipeline is None and len(names) == 1:
        pipeline = names[0]
    if pipeline not in names:
        raise ConfigError(f"choose a pipeline: --pipeline {' or --pipeline '.join(names)}")
    for line in story_lines(run.journal_path, PipelineName(pipeline), kind, number):
        say_line(line)
    return 0


def parse_subject(subject: str) -> tuple[Kind, int]:
    """`sample:17`, or a bare number for a sample."""
    kind, colon, number = subject.rpartition(":")
    if not colon:
        kind = "sample"
    if kind not in get_args(Kind) or not number.isdecimal():
        raise ConfigError(f"{subject!r}: expected sample:17, prompt:3, step:5 or version:6")
    return kind, int(number)  # type: ignore[return-value]


def doctor_command(run_dir: Path, at_s: float | None = None) -> int:
    """Exit 0 with the diagnosis of a live run; exit 1 when there is no answer.

    With `at_s`: the diagnosis at that number of seconds after the start, computed from the journal.
    """
    import httpx

    run = RunDir.open(run_dir)
    if at_s is not None:
        from penstock.sim.replay import replay_run

        replayed = replay_run(run_dir, at_s)
        _print_diagnosis(replayed.diagnosis, replayed.status)
        return 0
    if (ending := run.read_ending()) is not None:
        ended = f"the run has ended, no process can answer: {ending['how']}. {ending['sentence']}"
        say(ended.strip(), err=True)
        if ending["how"] != "complete":
            say(f"resume with: penstock run --resume {run.root}", err=True)
        say(f"state at a given time, here 60 s after the start: penstock doctor {run.root} --at 60", err=True)
        return 1
    try:
        endpoint, token = run.read_endpoint(), run.token()
    except (OSError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"cannot read the address of the controller in {run.root}: {error}") from error
    if endpoint is None:
        raise ConfigError(f"no controller has announced itself in {run.root}: the run has not started")
    headers = {"authorization": f"Bearer {token}"}
    try:
        with httpx.Client(base_url=endpoint.url, headers=headers, timeout=10.0, trust_env=False) as client:
            sentences = client.get("/v1/diagnosis").raise_for_status().json()
            status = client.get("/v1/status").raise_for_status().json()
    except httpx.HTTPError as error:
        say(f"the controller (process {endpoint.pid}, {endpoint.url}) does not answer: {error}", err=True)
        say(f"resume with: penstock run --resume {run.root}", err=True)
        return 1
    _print_diagnosis(sentences, status["pipelines"])
    for name, one in status["pipelines"].items():
        for part, registered in (("rollout", one["workers_alive"]), ("trainer", one["trainer_alive"])):
            for line in _starting(run, f"{name}.{part}") if not registered else ():
                say(f"  {line}")
    return 0


def _print_diagnosis(sentences: Mapping[Any, str], status: Mapping[Any, Mapping[str, Any]]) -> None:
    for name, sentence in sentences.items():
        one = status[name]
        say(f"{name}: {one['phase']}, step {one['step']}/{one['steps']}, idle for {one['stalled_s']:.0f} s")
        say(f"  {sentence}")


def _starting(run: RunDir, prefix: str) -> Iterator[str]:
    """Processes on this machine whose names start with `prefix`: they register with the controller after loading."""
    import psutil

    for process in psutil.process_iter(["cmdline", "create_time"]):
        arguments = process.info["cmdline"] or []
        if str(run.root) in arguments and "--name" in arguments:
            name = arguments[arguments.index("--name") + 1]
            if name.startswith(prefix):
                age_s = time.time() - process.info["create_time"]
                yield f"{name} (process {process.pid}) was started {age_s:.0f} s ago; its log: {run.log_path(name)}"


def publish_command(run_dir: Path, sink: str, *, trusts: bool = False) -> int:
    """Sends the lines that the sink does not have yet."""
    run = RunDir.open(run_dir)
    run.require_own(trusts, f"{sink} reads its own settings from the directory")
    config = load(run.config_path)
    publication = Publication(run, sink, config.metrics.project, config.model_dump(mode="json"))
    while publication.send():
        pass
    publication.close()
    say(f"sent {publication.sent} lines of {run.metrics_path} to {sink}")
    return 0
