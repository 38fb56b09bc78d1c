"""Exports one run to one HTML file that contains the answers to all requests of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from penstock.dashboard import page
from penstock.dashboard.io.answers import answer
from penstock.dashboard.io.files import own_files
from penstock.dashboard.io.shelf import Shelf
from penstock.errors import ConfigError
from penstock.runtime.rundir import write_atomically

READ_S = 600.0
SAMPLES = 50
"""Exported samples of each source, the newest."""
TAIL_CHARACTERS = 16_000


def export(shelf: Shelf, name: str, target: Path, plotly: Path) -> int:
    """Writes the file and returns its size in bytes. A live run is exported in its present state."""
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write {target}: there is no folder {target.parent}")
    reader = shelf.reader(name)
    reader.refresh(READ_S)
    answers: dict[str, Any] = {}

    def ask(view: str, **query: str) -> dict[str, Any]:
        found = answers[page.key_of(name, view, query)] = answer(reader, view, query)
        return found

    for view in ("overview", "loops", "pool", "troubles", "configuration"):
        ask(view)
    for pipeline in reader.pipelines:
        ask("flow", pipeline=pipeline.name)
        ask("weights", pipeline=pipeline.name)
        for metric in reader.folds.metrics.names("step", pipeline.name):
            ask("metric", pipeline=pipeline.name, name=metric)
    for process in reader.logs():
        tail = ask("log", process=process)
        tail["text"] = tail["text"][-TAIL_CHARACTERS:]
    for source in ask("samples")["sources"]:
        rows, count = reader.source(source).choose(count=SAMPLES)
        shown = ask("samples", source=source)
        shown |= {"rows": [row._asdict() for row in rows], "count": len(rows), "left_out": count - len(rows)}
        for row in rows:
            ask("sample", source=source, sample=str(row.sample))
    listing = [one for one in shelf.listing() if one["id"] == name]
    data = orjson.dumps({"runs": listing, "answers": answers})
    script = plotly.read_text(encoding="utf-8")
    files = own_files()
    text = page.exported(files["index.html"], files, script, data)
    try:
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    return len(text.encode("utf-8"))
