"""What the commands print of a run or a model does not control the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.cli import printing

HOSTILE = "\x1b]0;title\x07\x9b2Jtext\u202e\r\nnext\tcolumn"
ESCAPED = "\\x1b]0;title\\x07\\x9b2Jtext\\u202e\\r\nnext\tcolumn\n"


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]):
    printing.say(HOSTILE)
    printing.say(HOSTILE, err=True)
    assert capsys.readouterr() == (ESCAPED, ESCAPED)


def test_a_line_stays_one(capsys: pytest.CaptureFixture[str]):
    printing.say_line("one\nforged\x1b")
    assert capsys.readouterr().out == "one\\nforged\\x1b\n"


def test_a_completion_is_as_it_is_in_a_file_and_escaped_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    printing.pass_on(HOSTILE)
    assert capsys.readouterr().out == f"{HOSTILE}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printing.pass_on(HOSTILE)
    assert capsys.readouterr().out == ESCAPED


@pytest.mark.parametrize("module", ["after", "dashboard", "inspect"])
def test_commands_on_runs_print_in_no_other_way(module: str):
    text = (Path(printing.__file__).parent / f"{module}.py").read_text()
    assert not [way for way in ("typer.echo(", "print(", "stdout", "stderr") if way in text]
