"""Fails if this environment has a package that constraints.txt does not pin, or pins in another version.

Run it with the Python of an environment that `make` has made: one to which more was added fails for that reason.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).parents[1] / "constraints.txt"
NOT_LOCKED = {"penstock-rl", "pip"}
"""This project, and what installs: it comes with Python."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


pins = dict(line.split("==", 1) for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
pins = {normalized(name): version for name, version in pins.items()}
installed = {normalized(found.name): found.version.partition("+")[0] for found in distributions()}
wrong = {name: found for name, found in installed.items() if name not in NOT_LOCKED and pins.get(name) != found}
if wrong:
    lines = [f"  {name} {found}, pinned: {pins.get(name, 'not at all')}" for name, found in sorted(wrong.items())]
    sys.exit("\n".join([f"{len(wrong)} packages are not as {LOCK.name} has them:", *lines]))
sys.stdout.write(f"{len(installed) - len(NOT_LOCKED & installed.keys())} packages, all as {LOCK.name} has them\n")
