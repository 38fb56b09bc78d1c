"""`penstock bench`: finds and runs the files in `benchmarks/`.

The package includes those that measure a user's machine. The others measure Penstock itself and are only in its
repository.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import typer

from penstock.errors import ConfigError

PACKAGED = Path(__file__).resolve().parent / "benchmarks"


def bench_command(name: str | None, arguments: list[str]) -> int:
    folder = benchmarks_folder()
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if name is None:
        for stem, path in files.items():
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            typer.echo(f"{stem:16} {doc.splitlines()[0] if doc else ''}")
        if folder == PACKAGED:
            typer.echo("a checkout of Penstock has more benchmarks", err=True)
        return 0
    if name not in files:
        elsewhere = "; the others need a checkout of Penstock: run this there" if folder == PACKAGED else ""
        raise ConfigError(f"no benchmark {name!r} here; available: {', '.join(files)}{elsewhere}")
    sys.path.insert(0, str(folder))  # by path, so that processes it spawns find the module too
    module = importlib.import_module(name)
    return int(module.main(arguments) or 0)


def benchmarks_folder() -> Path:
    """Returns `benchmarks/` beside `src` or in the current directory, else the packaged folder."""
    for folder in (Path(__file__).resolve().parents[3] / "benchmarks", Path.cwd() / "benchmarks"):
        if (folder / "vs_trl.py").is_file():
            return folder
    return PACKAGED
