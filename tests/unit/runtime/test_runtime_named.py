"""What a configuration names is found, or the user is told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime.named import load_callable


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
