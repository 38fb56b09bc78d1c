"""The queries of the page about a run, by name. Every parameter is checked; none becomes part of a path."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

from penstock.dashboard import views
from penstock.dashboard.io.run_reader import RunReader
from penstock.dashboard.sample_index import Row
from penstock.errors import ConfigError
from penstock.journal.story import Kind, story_lines
from penstock.records.ids import PipelineName

Query = Mapping[str, str]
Answer = Callable[[RunReader, Query], dict[str, Any]]

PAGE_ROWS = 25
MOST_TEXT = 100_000
"""Characters of one sample that are sent to the page."""
MOST_DIGITS = 15
PREVIEW_CHARACTERS = 80
PREVIEWED_BYTES = 64 << 10


def overview(reader: RunReader, query: Query) -> dict[str, Any]:
    metrics = reader.folds.metrics
    return views.overview(reader.folds, reader.pipelines) | {
        "directory": str(reader.run.root),
        "began_at": metrics.began_at,
        "latest_at": reader.folds.latest.latest_at,
        "lines": metrics.lines,
        "unreadable_lines": metrics.unreadable,
        "events": reader.seq,
        "unread_events": reader.unread_events,
        "journal_trouble": reader.journal_trouble,
    }


def configuration(reader: RunReader, query: Query) -> dict[str, Any]:
    return {"rows": [{"key": key, "value": value} for key, value in reader.settings.items()]}


def flow(reader: RunReader, query: Query) -> dict[str, Any]:
    return views.flow(reader.folds, reader.pipeline(query.get("pipeline", "")).name)


def weights(reader: RunReader, query: Query) -> dict[str, Any]:
    return views.weights(reader.folds, reader.pipeline(query.get("pipeline", "")))


def loops(reader: RunReader, query: Query) -> dict[str, Any]:
    return views.loops(reader.folds)


def pool(reader: RunReader, query: Query) -> dict[str, Any]:
    alive = reader.verdict().word == "running"
    return views.pool(reader.folds, time.time() if alive else reader.folds.lanes.latest_at)


def troubles(reader: RunReader, query: Query) -> dict[str, Any]:
    return views.troubles(reader.folds, reader.failure_reports()) | {"logs": reader.logs()}


def metric(reader: RunReader, query: Query) -> dict[str, Any]:
    pipeline = reader.pipeline(query.get("pipeline", "")).name
    return views.step_metric(reader.folds, pipeline, query.get("name", ""))


def samples(reader: RunReader, query: Query) -> dict[str, Any]:
    order = {one.name: place for place, one in enumerate(reader.pipelines)}
    sources = sorted(reader.samples, key=lambda source: _place(source, order))
    if not sources:
        return {"sources": [], "source": "", "rows": [], "count": 0, "first": 0}
    source = query.get("source") or sources[0]
    first = _whole(query, "first") or 0
    rows, count = reader.source(source).choose(
        first=first, count=PAGE_ROWS, step=_whole(query, "step"), low=_real(query, "low"), high=_real(query, "high")
    )
    shown = [row._asdict() | {"preview": _preview(reader, source, row)} for row in rows]
    return {"sources": sources, "source": source, "rows": shown, "count": count, "first": first}


def _place(source: str, order: Mapping[str, int]) -> tuple[int, bool, str]:
    """Sort key: pipelines in configured order, training samples before evaluation samples."""
    pipeline, _, kind = source.partition("/")
    return order.get(pipeline, len(order)), kind != "samples", source


def _preview(reader: RunReader, source: str, row: Row) -> str:
    """The beginning of the policy's text."""
    if row.size > PREVIEWED_BYTES:
        return ""
    written = [piece for piece in _pieces(reader.read_sample(source, row)) if piece.get("by") == "policy"]
    return str(written[0].get("text", ""))[:PREVIEW_CHARACTERS] if written else ""


def _pieces(record: dict[str, Any]) -> list[dict[str, Any]]:
    pieces = record.get("pieces")
    return [piece for piece in pieces if isinstance(piece, dict)] if isinstance(pieces, list) else []


def sample(reader: RunReader, query: Query) -> dict[str, Any]:
    source, number = query.get("source", ""), _whole(query, "sample")
    row = reader.source(source).find(-1 if number is None else number)
    if row is None:
        raise ConfigError(f"sample {number} was not saved: only some samples of some steps are")
    record = reader.read_sample(source, row)
    left = MOST_TEXT
    for piece in _pieces(record):
        if "text" in piece:
            text = str(piece["text"])
            piece["text"], left = text[:left], max(0, left - len(text))
    return {"sample": record, "shortened": left == 0}


def story(reader: RunReader, query: Query) -> dict[str, Any]:
    """The output of `penstock story`. Reads the whole journal, which takes seconds for a long run."""
    kind, number = query.get("kind", ""), _whole(query, "number")
    if kind not in get_args(Kind) or number is None:
        raise ConfigError("expected the kind sample, prompt, step or version, and a number")
    name = PipelineName(reader.pipeline(query.get("pipeline", "")).name)
    return {"lines": story_lines(reader.run.journal_path, name, kind, number)}  # type: ignore[arg-type]


def log(reader: RunReader, query: Query) -> dict[str, Any]:
    return {"text": reader.log_tail(query.get("process", ""))}


ANSWERS: dict[str, Answer] = {
    "overview": overview,
    "flow": flow,
    "weights": weights,
    "loops": loops,
    "pool": pool,
    "troubles": troubles,
    "configuration": configuration,
    "metric": metric,
    "samples": samples,
    "sample": sample,
    "story": story,
    "log": log,
}
UNLOCKED = frozenset({"story", "log", "sample"})
"""Views that read files and not the folds: they do not hold the lock."""


def answer(reader: RunReader, view: str, query: Query) -> dict[str, Any]:
    """The data of a view, the state of the run and the share of it that has been read."""
    if view not in ANSWERS:
        raise ConfigError(f"there is no view {view!r}")
    if view in UNLOCKED:
        return ANSWERS[view](reader, query)
    with reader.lock:
        verdict = reader.verdict()
        revision = f"{reader.revision}.{verdict.word}.{verdict.sentence}"
        common = {
            "revision": revision,
            "state": {"word": verdict.word, "tone": verdict.tone, "sentence": verdict.sentence},
            "share_read": reader.share_read(),
        }
        if query.get("seen") == revision:
            return common | {"unchanged": True}
        return common | ANSWERS[view](reader, query)


def _whole(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ConfigError(f"{name} must be a whole number")
    return int(text)


def _real(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number") from None
