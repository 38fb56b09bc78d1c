"""What a configuration names is found, or the user is told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime.named import described, load_callable


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("from os import nothing", "ImportError"),
    ],
)
def test_a_module_that_breaks_when_it_is_imported_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, cause: str
):
    (tmp_path / "breaks_at_import.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"'breaks_at_import' cannot be imported: {cause}"):
        load_callable("filter", "breaks_at_import:f")


def test_what_the_users_code_raised_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "raising_things.py").write_text("def thing():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        load_callable("thing", "raising_things:thing")()
    where = f"({tmp_path}/raising_things.py:2)"
    assert described(caught.value) == f"ZeroDivisionError: division by zero {where}"


def test_a_package_that_the_users_module_misses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "importing_things.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"imports 'not_installed_here', which is not installed \(.*things.py:1\)"):
        load_callable("thing", "importing_things:thing")
