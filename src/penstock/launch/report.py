"""`penstock report`: a run as one HTML file to share. It has no script, fetches nothing, and reads only files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from penstock.launch.charts import curve_svg
from penstock.launch.markup import POLICY, Markup, filled, joined
from penstock.launch.python import Run
from penstock.launch.summary import read_entries
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


PAGE = (
    '<!doctype html><html lang=en><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{}">'
    '<meta name="viewport" content="width=device-width"><title>{}</title><style>{}</style></head><body>{}</body>'
)


def report(run: RunDir) -> str:
    """The whole page."""
    steps, evaluations, gauges = _metrics(run)
    ending = run.read_ending()
    status = _table_in(ending or {}, "status")
    pipelines = {name: _table_in(gauges, name) for name in gauges}
    pipelines |= {name: _table_in(ending, name) for ending in [_table_in(status, "pipelines")] for name in ending}
    names = list(steps) or list(pipelines)
    parts = [_head(run, ending), _summary(names, steps, evaluations, pipelines)]
    for name in names:
        parts.append(filled("<h2>{}</h2>", name))
        charts = list(_charts(steps.get(name, {}), evaluations.get(name, {})))
        first, more = charts[:CHARTS_SHOWN], charts[CHARTS_SHOWN:]
        parts.append(filled('<div class="charts">{}</div>', joined(first)))
        if more:
            details = '<details><summary>{} more</summary><div class="charts">{}</div></details>'
            parts.append(filled(details, len(more), joined(more)))
        parts.append(_samples(run, name))
        parts.append(_accounting(pipelines.get(name, {})))
    parts.append(_faults(run))
    config = run.read(run.config_path).decode("utf-8", "replace")
    folded = "<h2>Configuration</h2><details><summary>config.toml</summary><pre>{}</pre></details>"
    parts.append(filled(folded, config))
    return filled(PAGE, POLICY, run.root.name, Markup(STYLE), joined(parts))


def _table_in(table: dict[str, Any], key: str) -> dict[str, Any]:
    """The table at that key; an empty one if there is another value or none."""
    found = table.get(key)
    return found if isinstance(found, dict) else {}


Steps = dict[str, dict[int, dict[str, Any]]]


def _metrics(run: RunDir) -> tuple[Steps, Steps, dict[str, Any]]:
    """Steps and evaluations by pipeline, and the last gauges. A step that was retrained replaces its first attempt."""
    steps: Steps = defaultdict(dict)
    evaluations: Steps = defaultdict(dict)
    gauges: dict[str, Any] = {}
    for entry in read_entries(run.metrics_path):
        match entry:
            case {"kind": "step", "pipeline": str(name), "step": int(step)}:
                steps[name][step] = entry
            case {"kind": "evaluation", "pipeline": str(name), "version": int(version), "eval/reward": float() | int()}:
                evaluations[name][version] = entry
            case {"kind": "gauges", "pipelines": dict(found)}:
                gauges = found
    return steps, evaluations, gauges


def _head(run: RunDir, ending: dict[str, Any] | None) -> Markup:
    how = Run(run.root).state
    sentence = "" if ending is None else ending.get("sentence", "")
    wall_s = None if ending is None else ending.get("wall_s")
    wall = f" after {wall_s:.0f} s" if isinstance(wall_s, int | float) else ""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(_made_at(run)))
    kind = "ok" if how in ("complete", "running") else "bad"
    message = filled("<pre>{}</pre>", sentence) if sentence else Markup()
    line = '<h1>{}</h1><p><span class="{}">{}</span>{} · {}</p>{}'
    return filled(line, run.root.name, kind, how, wall, made, message)


def _made_at(run: RunDir) -> float:
    try:
        return float(orjson.loads(run.read(run.root / "run.json"))["made_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return run.root.stat().st_mtime


def _summary(names: Iterable[str], steps: Steps, evaluations: Steps, pipelines: dict[str, Any]) -> Markup:
    rows = []
    for name in names:
        rewards = [
            entry["reward"] for _, entry in sorted(steps.get(name, {}).items()) if entry.get("reward") is not None
        ]
        points = [entry for _, entry in sorted(evaluations.get(name, {}).items())]
        last = (
            f"{_shown(points[-1]['eval/reward'])} ± {_shown(points[-1].get('eval/reward_stderr'))}" if points else "–"
        )
        one = pipelines.get(name, {})
        rows.append(
            (
                name,
                f"{one.get('step', len(rewards))} / {one.get('steps', '?')}",
                f"{_mean(rewards[:10])} → {_mean(rewards[-10:])}",
                last,
                _count(one.get("samples_trained", 0)),
                _count(one.get("samples_dropped", 0)),
            )
        )
    return _table(
        ("pipeline", "steps", "reward, first → last ten steps", "last evaluation", "trained", "dropped"), rows
    )


def _charts(steps: dict[int, dict[str, Any]], evaluations: dict[int, dict[str, Any]]) -> Iterator[Markup]:
    if evaluations:
        points = [(float(version), entry["eval/reward"]) for version, entry in sorted(evaluations.items())]
        yield curve_svg(points, title="evaluation: reward", smooth=False)
    found = {key for entry in steps.values() for key, value in entry.items() if isinstance(value, int | float)}
    ordered = [key for key in FIRST_CHARTS if key in found]
    ordered += sorted(found - set(FIRST_CHARTS) - NOT_CHARTED)
    for key in ordered:
        points = [
            (float(step), float(entry[key]))
            for step, entry in sorted(steps.items())
            if isinstance(entry.get(key), int | float)
        ]
        if len({value for _, value in points}) > 1 or key == "reward":
            yield curve_svg(points, title=key)


def _samples(run: RunDir, name: str) -> Markup:
    """Samples of the last step that was written."""
    try:
        text = run.read(run.rollouts(name) / "samples.jsonl")
        lines = [orjson.loads(line) for line in text.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
    except (OSError, orjson.JSONDecodeError):
        return Markup()
    last = [entry for entry in lines if entry.get("step") == lines[-1].get("step")][:SAMPLES_SHOWN]
    rows = [
        (_shown(entry.get("sample")), _shown(entry.get("reward")), filled("<code>{}</code>", _written(entry)))
        for entry in last
    ]
    if not rows:
        return Markup()
    column = "text (policy in green)" if "pieces" in last[0] else ""
    title = filled("<h3>Samples of step {}</h3>", _shown(last[0].get("step")))
    return joined([title, _table(("sample", "reward", column), rows)])


def _written(sample: dict[str, Any]) -> str:
    """The prompt and the completion; for an episode without text, its figures."""
    pieces = sample.get("pieces")
    if not isinstance(pieces, list):
        figures = {key: value for key, value in sample.items() if key not in IN_OTHER_COLUMNS}
        line = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items())
        return line[:SAMPLE_CHARACTERS]
    return joined([_piece(one) for one in pieces if isinstance(one, dict)])


def _shown(value: Any) -> str:
    """The value; of a long list, such as hundreds of actions, the first items and its length."""
    if isinstance(value, list) and len(value) > ITEMS_SHOWN:
        return f"{value[:ITEMS_SHOWN]} … {len(value)} in all"
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _piece(piece: dict[str, Any]) -> Markup:
    text = str(piece.get("text", piece.get("token_ids", "")))
    return filled('<span class="{}">{}</span>', piece.get("by", ""), text[:SAMPLE_CHARACTERS])


def _accounting(one: dict[str, Any]) -> Markup:
    """Every issued sample is counted in exactly one of these rows."""
    if not one:
        return Markup()
    states = [key for key in one if key.startswith("samples_") and key.removeprefix("samples_") in STATES]
    rows = [(key.removeprefix("samples_"), _count(one[key])) for key in states]
    rows += [
        (f"dropped: {key.removeprefix('dropped_')}", _count(value))
        for key, value in one.items()
        if _dropped(key, value)
    ]
    rows.append(("issued in all", _count(one.get("issued", 0))))
    error = one.get("conservation_error", 0)
    verdict = "adds up" if not error else f"differs by {error}"
    return joined([filled("<h3>Accounting: {}</h3>", verdict), _table(("state", "samples"), rows)])


STATES = ("leased", "delivered", "buffered", "dispatched", "trained", "dropped")


def _dropped(key: str, value: Any) -> bool:
    return key.startswith("dropped_") and bool(value)


def _faults(run: RunDir) -> Markup:
    """Processes that failed, and warnings of the supervisor."""
    log = run.log_path("supervisor")
    lines = run.read(log).decode("utf-8", "replace").splitlines() if log in run.files("logs/*.log") else []
    warnings = [line for line in lines if " WARNING " in line or " ERROR " in line]
    rows = [(line.split(" supervisor ", 1)[0][:23], line.partition(": ")[2]) for line in warnings[-FAULTS_SHOWN:]]
    for path in run.files("failures/*.json"):
        failure = run.read_failure(path.stem) or {}
        rows.append((path.stem, str(failure.get("message", ""))))
    if not rows:
        return Markup("<h2>Faults</h2><p>None: no process was restarted, and no warning was written.</p>")
    return joined([Markup("<h2>Faults</h2>"), _table(("when, or process", "what"), rows)])


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Markup:
    head = joined([filled("<th>{}</th>", column) for column in columns])
    body = joined([filled("<tr>{}</tr>", joined([filled("<td>{}</td>", cell) for cell in row])) for row in rows])
    return filled('<div class="scroll"><table><tr>{}</tr>{}</table></div>', head, body)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "–"
