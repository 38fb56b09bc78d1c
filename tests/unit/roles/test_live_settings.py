"""What may be changed while a run goes on is read again when its file changes."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.config.load import load
from penstock.roles.live_settings import LiveSettings

CONFIG = """
[[pipeline]]
name = "p"
steps = 1
env.name = "copy"
model.kind = "tiny"
rollout.prefetch = {prefetch}
"""


def test_prefetch_follows_the_file_and_a_mistake_in_it_changes_nothing(tmp_path: Path, caplog):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(prefetch="true"))
    live = LiveSettings(path, load(path))
    said = live.prefetch
    with caplog.at_level(logging.INFO):
        for text, expected in (("true", True), ("false", False), ("flase", False), ("true", True), ("false", False)):
            path.write_text(CONFIG.format(prefetch=text) + "# edited\n" * len(text))
            live.poll()
            live.poll()
            assert said == {"p": expected}
        path.unlink()
        live.poll()
    assert said == {"p": False}
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO", "INFO"]
