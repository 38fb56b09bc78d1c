"""`penstock report`: a run as one HTML file to share. It has no script, fetches nothing, and reads only files."""

from __future__ import annotations

import html
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from penstock.launch.charts import curve_svg
from penstock.launch.python import Run
from penstock.runtime.rundir import RunDir

SAMPLES_SHOWN = 8
ITEMS_SHOWN = 20
SAMPLE_CHARACTERS = 1200
FAULTS_SHOWN = 40
CHARTS_SHOWN = 8
IN_OTHER_COLUMNS = ("sample", "reward", "step")
FIRST_CHARTS = ("reward", "loss", "entropy", "grad_norm", "kl_sampling", "staleness_mean", "length", "step_s")
NOT_CHARTED = {"step", "at", "version", "life", "samples", "prompts"}
STYLE = """
:root { color-scheme: light dark; --line: #ddd; --sunk: #f6f6f6; --policy: #e3f1e3; --ok: #17662b; --bad: #a3201a }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line) }
.charts { display: flex; flex-wrap: wrap; gap: .6rem } .muted { color: #777 }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25rem .7rem .25rem 0;
vertical-align: top; border-bottom: 1px solid var(--line) } th { font-weight: 600 }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre, code { font: 12.5px/1.45 ui-monospace, monospace } pre { background: var(--sunk); padding: .7rem; overflow-x: auto;
white-space: pre-wrap } .policy { background: var(--policy) } .scroll { overflow-x: auto }
.ok { color: var(--ok) } .bad { color: var(--bad) }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3f47; --sunk: #20242b; --policy: #1f4a2c; --ok: #5fcf80; --bad: #ff8a80 }
  body { background: #14171c; color: #e4e4e4 }
}
"""


def report(run: RunDir) -> str:
    """The whole page."""
    steps, evaluations, gauges = _metrics(run.metrics_path)
    ending = run.read_ending()
    status = (ending or {}).get("status") or {}
    pipelines = status.get("pipelines") or gauges
    names = list(steps) or list(pipelines)
    parts = [_head(run, ending), _summary(names, steps, evaluations, pipelines)]
    for name in names:
        parts.append(f"<h2>{_text(name)}</h2>")
        charts = list(_charts(steps.get(name, {}), evaluations.get(name, {})))
        first, more = charts[:CHARTS_SHOWN], charts[CHARTS_SHOWN:]
        parts.append(f'<div class="charts">{"".join(first)}</div>')
        if more:
            parts.append(
                f'<details><summary>{len(more)} more</summary><div class="charts">{"".join(more)}</div></details>'
            )
        parts.append(_samples(run.rollouts(name) / "samples.jsonl"))
        parts.append(_accounting(pipelines.get(name, {})))
    parts.append(_faults(run))
    config = run.config_path.read_text(encoding="utf-8")
    parts.append(f"<h2>Configuration</h2><details><summary>config.toml</summary><pre>{_text(config)}</pre></details>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(run.root.name)}'
    return (
        f"<!doctype html><html lang=en><head>{head}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body>"
    )


Steps = dict[str, dict[int, dict[str, Any]]]


def _metrics(path: Path) -> tuple[Steps, Steps, dict[str, Any]]:
    """Steps and evaluations by pipeline, and the last gauges. A step that was retrained replaces its first attempt."""
    steps: Steps = defaultdict(dict)
    evaluations: Steps = defaultdict(dict)
    gauges: dict[str, Any] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        match entry.get("kind"):
            case "step":
                steps[entry["pipeline"]][entry["step"]] = entry
            case "evaluation" if entry.get("eval/reward") is not None:
                evaluations[entry["pipeline"]][entry["version"]] = entry
            case "gauges":
                gauges = entry.get("pipelines", gauges)
    return steps, evaluations, gauges


def _head(run: RunDir, ending: dict[str, Any] | None) -> str:
    how = Run(run.root).state
    sentence = "" if ending is None else ending.get("sentence", "")
    wall = "" if ending is None or "wall_s" not in ending else f" after {ending['wall_s']:.0f} s"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(_made_at(run)))
    kind = "ok" if how in ("complete", "running") else "bad"
    message = f"<pre>{_text(sentence)}</pre>" if sentence else ""
    return f'<h1>{_text(run.root.name)}</h1><p><span class="{kind}">{_text(how)}</span>{wall} · {made}</p>{message}'


def _made_at(run: RunDir) -> float:
    try:
        return float(orjson.loads((run.root / "run.json").read_bytes())["made_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return run.root.stat().st_mtime


def _summary(names: Iterable[str], steps: Steps, evaluations: Steps, pipelines: dict[str, Any]) -> str:
    rows = []
    for name in names:
        rewards = [
            entry["reward"] for _, entry in sorted(steps.get(name, {}).items()) if entry.get("reward") is not None
        ]
        points = [entry for _, entry in sorted(evaluations.get(name, {}).items())]
        last = f"{points[-1]['eval/reward']:.4g} ± {points[-1]['eval/reward_stderr']:.2g}" if points else "–"
        one = pipelines.get(name, {})
        rows.append(
            (
                name,
                f"{one.get('step', len(rewards))} / {one.get('steps', '?')}",
                f"{_mean(rewards[:10])} → {_mean(rewards[-10:])}",
                last,
                f"{one.get('samples_trained', 0):,}",
                f"{one.get('samples_dropped', 0):,}",
            )
        )
    return _table(
        ("pipeline", "steps", "reward, first → last ten steps", "last evaluation", "trained", "dropped"), rows
    )


def _charts(steps: dict[int, dict[str, Any]], evaluations: dict[int, dict[str, Any]]) -> Iterator[str]:
    if evaluations:
        points = [(float(version), entry["eval/reward"]) for version, entry in sorted(evaluations.items())]
        yield curve_svg(points, title="evaluation: reward", smooth=False)
    found = {key for entry in steps.values() for key, value in entry.items() if isinstance(value, int | float)}
    ordered = [key for key in FIRST_CHARTS if key in found]
    ordered += sorted(found - set(FIRST_CHARTS) - NOT_CHARTED)
    for key in ordered:
        points = [
            (float(step), float(entry[key])) for step, entry in sorted(steps.items()) if entry.get(key) is not None
        ]
        if len({value for _, value in points}) > 1 or key == "reward":
            yield curve_svg(points, title=key)


def _samples(path: Path) -> str:
    """Samples of the last step that was written."""
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    except (OSError, orjson.JSONDecodeError):
        return ""
    last = [entry for entry in lines if entry["step"] == lines[-1]["step"]][:SAMPLES_SHOWN] if lines else []
    rows = []
    for entry in last:
        rows.append((f"{entry['sample']}", f"{entry['reward']:.4g}", _Raw(f"<code>{_written(entry)}</code>")))
    if not rows:
        return ""
    column = "text (policy in green)" if "pieces" in last[0] else ""
    return f"<h3>Samples of step {last[0]['step']}</h3>" + _table(("sample", "reward", column), rows)


def _written(sample: dict[str, Any]) -> str:
    """The prompt and the completion; for an episode without text, its figures."""
    if "pieces" not in sample:
        figures = {key: value for key, value in sample.items() if key not in IN_OTHER_COLUMNS}
        line = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items())
        return _text(line[:SAMPLE_CHARACTERS])
    return "".join(_piece(one) for one in sample["pieces"])


def _shown(value: Any) -> str:
    """The value; of a long list, such as hundreds of actions, the first items and its length."""
    if isinstance(value, list) and len(value) > ITEMS_SHOWN:
        return f"{value[:ITEMS_SHOWN]} … {len(value)} in all"
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _piece(piece: dict[str, Any]) -> str:
    text = str(piece.get("text", piece.get("token_ids", "")))
    return f'<span class="{_text(piece.get("by", ""))}">{_text(text[:SAMPLE_CHARACTERS])}</span>'


def _accounting(one: dict[str, Any]) -> str:
    """Every issued sample is counted in exactly one of these rows."""
    if not one:
        return ""
    states = [key for key in one if key.startswith("samples_") and key.removeprefix("samples_") in STATES]
    rows = [(key.removeprefix("samples_"), f"{one[key]:,}") for key in states]
    rows += [
        (f"dropped: {key.removeprefix('dropped_')}", f"{value:,}") for key, value in one.items() if _dropped(key, value)
    ]
    rows.append(("issued in all", f"{one.get('issued', 0):,}"))
    error = one.get("conservation_error", 0)
    verdict = "adds up" if not error else f"differs by {error}"
    return f"<h3>Accounting: {verdict}</h3>" + _table(("state", "samples"), rows)


STATES = ("leased", "delivered", "buffered", "dispatched", "trained", "dropped")


def _dropped(key: str, value: Any) -> bool:
    return key.startswith("dropped_") and bool(value)


def _faults(run: RunDir) -> str:
    """Processes that failed, and warnings of the supervisor."""
    log = run.log_path("supervisor")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    warnings = [line for line in lines if " WARNING " in line or " ERROR " in line]
    rows = [(line.split(" supervisor ", 1)[0][:23], line.partition(": ")[2]) for line in warnings[-FAULTS_SHOWN:]]
    for path in sorted((run.root / "failures").glob("*.json")):
        failure = run.read_failure(path.stem) or {}
        rows.append((path.stem, str(failure.get("message", ""))))
    if not rows:
        return "<h2>Faults</h2><p>None: no process was restarted, and no warning was written.</p>"
    return "<h2>Faults</h2>" + _table(("when, or process", "what"), rows)


class _Raw(str):
    """Text that is already HTML."""


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(cell: str) -> str:
    return cell if isinstance(cell, _Raw) else _text(cell)


def _text(text: str) -> str:
    return html.escape(str(text))


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "–"
