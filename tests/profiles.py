"""Two profiles for property tests: quick, which every run uses, and thorough, for a night: PROFILE=thorough."""

from __future__ import annotations

import os

FACTORS = {"quick": 0.4, "thorough": 20}
FEWEST = 10


def examples(count: int) -> int:
    """How many examples a property test draws."""
    return max(FEWEST, round(count * FACTORS[os.environ.get("PROFILE", "quick")]))
