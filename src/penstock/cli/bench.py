"""`penstock bench`: finds and runs the files in `benchmarks/`."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import typer

from penstock.errors import ConfigError


def bench_command(name: str | None, arguments: list[str]) -> int:
    folder = benchmarks_folder()
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if name is None:
        for stem, path in files.items():
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            typer.echo(f"{stem:16} {doc.splitlines()[0] if doc else ''}")
        return 0
    if name not in files:
        raise ConfigError(f"no benchmark {name!r}; there is {', '.join(files)}")
    sys.path.insert(0, str(folder))  # by path, so that processes it spawns find the module too
    module = importlib.import_module(name)
    return int(module.main(arguments) or 0)


def benchmarks_folder() -> Path:
    """In a checkout they stand beside `src`; an installed Penstock looks in the present directory."""
    for folder in (Path(__file__).resolve().parents[3] / "benchmarks", Path.cwd() / "benchmarks"):
        if folder.is_dir():
            return folder
    raise ConfigError("the benchmarks are not part of the installed package: run this in a checkout of Penstock")
