"""Hooks of the site's build: the reference of keys, and links to files outside docs/."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

from penstock.config.reference import keys

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The site holds docs/ only: a link to a file outside becomes its text, if there is such a file."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        return link[1]

    return LINK.sub(shown, markdown)


def reference() -> str:
    """Every key of a configuration, as `penstock keys` explains it."""
    lines = ["# Configuration keys", "", "The same as `penstock keys`, generated from the settings themselves."]
    for table, entries in groupby(keys(), key=lambda key: key.table):
        lines += ["", f"## `{table}`", "", "| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{_name(key.path)}` | {_cell(key.default)} | {_text(key.meaning)} |" for key in entries]
    return "\n".join(lines) + "\n"


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _cell(value: str) -> str:
    return f"`{_text(value)}`" if value else ""


def _text(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
