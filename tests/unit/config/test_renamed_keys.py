"""A key of an earlier version is answered with what it is called now."""

from __future__ import annotations

import pytest

from penstock.config.load import RENAMED, validate
from penstock.config.reference import keys
from penstock.errors import ConfigError

PIPELINE = {"name": "p", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_key_is_answered_with_the_new_one(old: str):
    *tables, last = old.split(".")
    tree: dict = {"pipeline": [dict(PIPELINE)]}
    node = tree
    for table in tables:
        node = tree["pipeline"][0] if table == "pipeline" else node.setdefault(table, {})
    node[last] = "anything"
    with pytest.raises(ConfigError, match=f"is now called '{RENAMED[old]}'"):
        validate(tree)


@pytest.mark.parametrize("new", sorted(RENAMED.values()))
def test_the_new_key_exists(new: str):
    assert keys(new)
