"""The files of the page: our own from this package, and the charting library from where it is installed."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path

from penstock.dashboard.page import SCRIPTS, STYLE


def own_files() -> dict[str, str]:
    """By name, `index.html` among them."""
    folder = resources.files("penstock.dashboard") / "static"
    return {name: (folder / name).read_text(encoding="utf-8") for name in ("index.html", STYLE, *SCRIPTS)}


def plotly_script() -> Path | None:
    """The script that the installed `plotly` brings along; None when it is not installed. Nothing is imported."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    return None
