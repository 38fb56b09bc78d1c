"""`penstock init`: a small commented project to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import typer

from penstock.errors import ConfigError
from penstock.runtime.named import nearest


def init_command(template: str, folder: Path) -> int:
    """Writes the files of a template. Raises `ConfigError` if one of them exists."""
    templates = {one.name: one for one in files("penstock.cli").joinpath("templates").iterdir() if one.is_dir()}
    if template not in templates:
        raise ConfigError(f"there is no template {template!r}{nearest(template, templates)}")
    written = [one for one in templates[template].iterdir() if one.is_file()]
    if existing := [one.name for one in written if (folder / one.name).exists()]:
        raise ConfigError(f"{folder} has {', '.join(sorted(existing))} already: choose an empty directory with --to")
    folder.mkdir(parents=True, exist_ok=True)
    for one in written:
        (folder / one.name).write_bytes(one.read_bytes())
        typer.echo(f"wrote {folder / one.name}")
    inside = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"next: {inside}penstock run run.toml")
    return 0
