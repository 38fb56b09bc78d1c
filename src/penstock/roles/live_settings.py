"""Settings that can be changed during a run, by editing the configuration in its directory: `rollout.prefetch`.

All others are read when a process starts.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from penstock.config.load import load
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.records.ids import PipelineName

log = logging.getLogger(__name__)

POLL_EVERY_S = 1.0


class LiveSettings:
    """Polls the file and applies its changes; a file that cannot be read changes nothing."""

    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self._seen = (0, 0, 0)
        self._seen = self._state()
        self.prefetch = _prefetch(config)

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await asyncio.to_thread(self.poll)
            await asyncio.sleep(POLL_EVERY_S)

    def poll(self) -> None:
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            found = _prefetch(load(self._path))
        except ConfigError as error:
            log.warning("the configuration was changed, but cannot be read: %s", error)
            return
        for name, on in found.items():
            if self.prefetch.get(name) not in (None, on):
                log.info("%s: rollout.prefetch is now %s", name, on)
                self.prefetch[name] = on

    def _state(self) -> tuple[int, int, int]:
        try:
            file = self._path.stat()
        except OSError:  # for a moment, while an editor saves it
            return self._seen
        return file.st_ino, file.st_mtime_ns, file.st_size


def _prefetch(config: Config) -> dict[PipelineName, bool]:
    return {PipelineName(pipeline.name): pipeline.rollout.prefetch for pipeline in config.pipeline}
