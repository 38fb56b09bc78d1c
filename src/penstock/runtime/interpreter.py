"""How a Python child process is started. Imports only the standard library: it is used before all other imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def python_command(*arguments: str, interpreter: str = "") -> list[str]:
    """The command that runs this interpreter, or another one, with these arguments.

    Python would put the working directory, or the script's, first on its path: a file `http.py` there would be executed
    in place of the library's module. `run.extra_path` names the directories of the user's code.
    """
    return [interpreter or sys.executable, "-P", *arguments]


def search_path(*folders: Path | str) -> str:
    """PYTHONPATH of a child: these directories, then those of this process.

    Without empty entries: Python reads them as the working directory.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [*map(str, folders), *inherited]))
