"""Seeds of processes, derived from the run's seed, the name of the process, and its number of starts."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from penstock.runtime.rundir import write_atomically


def next_seed(folder: Path, name: str, run_seed: int) -> int:
    """The seed of this start of the process. Repeating a run gives the same seeds. A process that is restarted in a run
    gets another seed, so that it does not repeat its samples. Only this process may write the counter `folder/name`.
    """
    counter = folder / name
    try:
        starts = int(counter.read_text())
    except (FileNotFoundError, ValueError):
        starts = 0
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(counter, str(starts + 1))
    return zlib.crc32(struct.pack("<qq", run_seed, starts) + name.encode())
