"""Seeds of processes: they follow from the run's seed, what the process is, and how often it was started."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from penstock.runtime.rundir import write_atomically


def next_seed(folder: Path, name: str, run_seed: int) -> int:
    """Of this start of the process. The same run again gives the same seeds; a process that is started again in one run
    is given another, so that it does not repeat what it drew before. Only this process may count in `folder/name`.
    """
    counter = folder / name
    try:
        starts = int(counter.read_text())
    except (FileNotFoundError, ValueError):
        starts = 0
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(counter, str(starts + 1))
    return zlib.crc32(struct.pack("<qq", run_seed, starts) + name.encode())
