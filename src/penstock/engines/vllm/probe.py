"""What an interpreter has of vLLM and of this package, as JSON on standard output.

Run as a script by the interpreter in question, so it imports only the standard library: a package named `penstock` may
be there that is another project's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

PLUGINS = "vllm.general_plugins"
"""The entry points through which vLLM loads the weight transfer of this package."""


def build_of(package: Path) -> str:
    """A digest of the package's source: equal builds have equal ones, wherever and however they are installed."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def found() -> dict[str, object]:
    spec = importlib.util.find_spec("penstock")
    folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    return {
        "vllm": importlib.util.find_spec("vllm") is not None,
        "penstock": str(folders[0]) if folders else None,
        "build": build_of(folders[0]) if folders else None,
        "plugin": any(one.name == "penstock" for one in importlib.metadata.entry_points(group=PLUGINS)),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()))
