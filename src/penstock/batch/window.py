"""How old a sample may be, and what its age looks like over a batch.

Step `s` trains version `s`; a sample of version `v` is then `s - v` steps stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import LocalProtocolError


def staleness(step: int, versions: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64[samples]: how many optimiser steps lie between each sample and the step that trains it."""
    ages = step - np.asarray(versions, np.int64)
    if ages.size and ages.min() < 0:
        raise LocalProtocolError(
            f"step {step} was given a sample of version {step - int(ages.min())}, which is not made yet"
        )
    return ages


def outdated(step: int, versions: Sequence[int] | np.ndarray, max_staleness: int) -> np.ndarray:
    """bool[samples]: which samples are too old for `step`."""
    return staleness(step, versions) > max_staleness
