"""Two profiles for property tests: quick, which every run uses, and thorough, for a night: PROFILE=thorough."""

from __future__ import annotations

import os

FACTORS = {"quick": 1, "thorough": 20}


def examples(count: int) -> int:
    """How many examples a property test draws: `count` in the quick profile."""
    return count * FACTORS[os.environ.get("PROFILE", "quick")]
