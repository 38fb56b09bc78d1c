"""What an example or a plug-in imports comes from `penstock` itself."""

from __future__ import annotations

import ast
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNPACKS = "smollm2.py"
"""Converts a GGUF file once, which is not part of training."""


def test_examples_import_public_names_only():
    for path in EXAMPLES.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        inside = [name for name in modules if name.startswith("penstock.") and path.name != UNPACKS]
        assert not inside, f"{path.name} imports {inside}"
