"""The files of the page: our own from this package, and the charting library from where it is installed."""

from __future__ import annotations

from importlib import metadata, resources
from pathlib import Path

from penstock.dashboard.page import SCRIPTS, STYLE


def own_files() -> dict[str, str]:
    """The files of the page by name, including `index.html`."""
    folder = resources.files("penstock.dashboard") / "static"
    return {name: (folder / name).read_text(encoding="utf-8") for name in ("index.html", STYLE, *SCRIPTS)}


def plotly_script() -> Path:
    """The script in the package plotly, found without importing it."""
    return Path(str(metadata.distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))
