"""The installed `penstock` command: `penstock run` starts to import torch before it reads the configuration.

Before that, only the standard library is imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working directory there, the installed command does not

import signal

from penstock.errors import INTERRUPTED
from penstock.launch import preload

NO_PROCESS = {"--help", "--dry-run", "ray", "--launcher=ray"}
"""With these arguments `run` starts no process here."""


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        signal.signal(signal.SIGINT, _end)  # until there is a run to stop
        if NO_PROCESS.isdisjoint(sys.argv) and preload.possible():
            preload.begin()
    from penstock.cli.main import main

    main()


def _end(*_: object) -> None:
    sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
