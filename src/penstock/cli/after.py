"""`penstock export`, `eval`, `sample` and `report`: commands on the checkpoints and the metrics of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from penstock.cli.printing import pass_on, say
from penstock.config.load import parse_value
from penstock.errors import ConfigError
from penstock.launch.report import report
from penstock.runtime.rundir import RunDir, write_atomically


def export_command(path: Path, *, pipeline: str | None, step: str, to: Path | None, merged: bool) -> int:
    one = _offline().saved(path, pipeline=pipeline, step=step)
    target = to if to is not None else Path("exports") / f"{path.resolve().name}-{one.pipeline.name}-{one.step}"
    written = _offline().export(one, target, merged=merged)
    say(f"{written}: step {one.step} of {one.pipeline.name}")
    opened = f"transformers.AutoModelForCausalLM.from_pretrained({str(written)!r})"
    if one.pipeline.lora is not None and not merged:
        opened = f"peft.AutoPeftModelForCausalLM.from_pretrained({str(written)!r}); the base model is needed too"
    say(f"open it with {opened}", err=True)
    return 0


def eval_command(
    path: Path,
    *,
    env: str | None,
    options: list[str],
    pipeline: str | None,
    step: str,
    prompts: int | None,
    samples: int,
    temperature: float,
    max_new_tokens: int | None,
    engine: list[str],
    trusts: bool = False,
) -> int:
    if samples > 1 and not temperature:
        raise ConfigError("--samples above 1 are all equal at temperature 0; set --temperature")
    table: dict[str, Any] | None = None
    if env is not None:
        table = {"name": env, "options": dict(_option("--option", text) for text in options)}
    elif options:
        raise ConfigError("--option is for the environment of --env: name one")
    elif (path / "config.json").exists() and not (path / "run.json").exists():
        raise ConfigError(f"{path} is a model without an environment: name one with --env")
    one = _offline().to_evaluate(path, pipeline=pipeline, step=step, env=table, trusts=trusts)
    if engine:
        one = _offline().served_by(one, dict(_option("--engine", text) for text in engine))
    if max_new_tokens is not None:
        rollout = one.pipeline.rollout.model_copy(update={"max_new_tokens": max_new_tokens})
        one = _offline().replaced(one, rollout)
    found = _offline().evaluate(one, prompts=prompts, samples=samples, temperature=temperature)
    limit = "" if one.pipeline.kind != "language" else f", at most {one.pipeline.rollout.max_new_tokens} new tokens"
    say(f"{one.title}{limit}")
    say(
        f"reward {found.mean:.4g}, 95 % interval {found.low:.4g} to {found.high:.4g}, "
        f"{found.prompts} prompts, {found.samples} samples" + (f", {found.failed} failed" if found.failed else "")
    )
    return 0


def sample_command(
    path: Path,
    prompt: str,
    *,
    pipeline: str | None,
    step: str,
    count: int,
    temperature: float,
    max_new_tokens: int | None,
) -> int:
    one = _offline().saved(path, pipeline=pipeline, step=step)
    drawn = _offline().sample(one, prompt, count=count, temperature=temperature, max_new_tokens=max_new_tokens)
    for completion in drawn:
        pass_on(completion)
    return 0


def report_command(path: Path, to: Path | None) -> int:
    run = RunDir.open(path)
    page = report(run)
    if to is None:
        run.write(target := run.root / "report.html", page.encode("utf-8"))
    else:
        write_atomically(target := to, page)
    say(f"{target}: {len(page.encode('utf-8')) / 1e3:.0f} kB")
    return 0


def _option(flag: str, text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"{flag} {text!r}: expected key=value")
    return key.strip(), parse_value(value)


def _offline() -> Any:
    """Loads torch: only for the commands that need it."""
    return importlib.import_module("penstock.roles.offline")
