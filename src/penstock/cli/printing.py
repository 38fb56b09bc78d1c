"""Printing: a text of a run or of a model must not control the terminal."""

from __future__ import annotations

import sys

import typer

from penstock.runtime.terminal import escape_controls


def say(text: str, *, err: bool = False) -> None:
    """Prints a text with its control characters escaped."""
    typer.echo(escape_controls(text), err=err)


def say_line(text: str) -> None:
    """The same as one line: a line end within it would look like another line of the command."""
    typer.echo(escape_controls(text).replace("\n", "\\n"))


def pass_on(text: str) -> None:
    """Prints a text as it is into a file or a pipe, and escaped to a terminal."""
    typer.echo(escape_controls(text) if sys.stdout.isatty() else text)
