"""Keeping the garbage collector off the loop."""

from __future__ import annotations

import gc


def spare_what_exists() -> None:
    """Call once, when start-up is over: what exists by now (modules, classes, caches) will live as long as the process.

    A full collection walks over everything ever imported, 20 ms in a controller and ten times that beside a large
    library, and it strikes in the middle of a loop. After this call it walks only over what came later.
    """
    gc.collect()
    gc.freeze()
