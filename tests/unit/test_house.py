"""The house rules that a machine can check: one test per rule, which names every file that breaks it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import penstock

SOURCE = Path(__file__).resolve().parents[2] / "src" / "penstock"
FORBIDDEN_NAMES = ("utils", "util", "common", "helpers", "helper", "base", "manager", "misc", "mixin")
VAGUE_CLASS = re.compile(r"(Manager|Helper|Util|Utils|Mixin|Base)$")


@cache
def texts() -> dict[Path, str]:
    """Every source file; read by the first test, since every process of a test run imports this module."""
    return {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in texts().items()}


def breaking(rule: Callable[[Path], bool]) -> list[str]:
    return [str(path.relative_to(SOURCE)) for path in texts() if rule(path)]


def test_names_explain_themselves():
    assert not breaking(lambda path: path.stem in FORBIDDEN_NAMES)
    classes = [node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if VAGUE_CLASS.search(name)]


def test_package_files_only_export():
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If)  # "if TYPE_CHECKING"

    def exports(node: ast.stmt) -> bool:
        return isinstance(node, allowed) or (
            isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        )

    packages = {path: tree for path, tree in trees().items() if path.name == "__init__.py"}
    assert not breaking(lambda path: path in packages and not all(map(exports, packages[path].body)))


def test_the_public_names_are_all_there():
    for name in penstock.__all__:
        assert getattr(penstock, name)
        assert name in dir(penstock)
    with pytest.raises(AttributeError):
        _ = penstock.nothing  # type: ignore[attr-defined]


def test_help_on_train_is_that_of_the_function():
    """Once a module of the package `penstock.train` is imported, that name is the package."""
    package = import_module("penstock.train")
    assert package.__doc__ == penstock.train.__doc__ == import_module("penstock.launch.python").train.__doc__
    assert "environment" in inspect.signature(package).parameters  # type: ignore[arg-type]


def test_every_module_says_what_it_is():
    assert not breaking(lambda path: path.name != "__init__.py" and not ast.get_docstring(trees()[path]))


def test_nothing_is_unpickled():
    unpickles = re.compile(r"\bpickle\.loads?\(|\btorch\.load\(")
    assert not breaking(lambda path: bool(unpickles.search(texts()[path])))


def test_tasks_are_supervised():
    """A bare `asyncio.create_task` is forgotten when it fails; `Tasks` and `TaskGroup` are not."""
    bare = ("asyncio.create_task(", "asyncio.ensure_future(")
    assert not breaking(lambda path: any(call in texts()[path] for call in bare))


def test_examples_and_templates_import_public_names_only():
    """A plug-in is written against `penstock` and `penstock.testing`; so is all that a reader copies."""
    examples = sorted((SOURCE.parents[1] / "examples").glob("*.py"))
    templates = [path for path in texts() if "templates" in path.parts]
    assert len(examples) > 3
    assert len(templates) > 1
    internal = {}
    for path in [*examples, *templates]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        modules += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        internal[path.name] = [name for name in modules if name.startswith("penstock.") and name != "penstock.testing"]
    assert not {name: found for name, found in internal.items() if found}


def test_python_children_are_started_by_one_function():
    """`python_command` keeps the working directory off their path."""

    def is_interpreter(node: ast.expr) -> bool:
        return ast.unparse(node) == "sys.executable" or (isinstance(node, ast.Constant) and node.value in ("-m", "-c"))

    def starts_python(node: ast.AST) -> bool:
        if isinstance(node, ast.List | ast.Tuple):
            return any(map(is_interpreter, node.elts))
        called = isinstance(node, ast.Call) and ast.unparse(node.func) not in ("python_command", "os.path.dirname")
        return called and any(map(is_interpreter, node.args))  # type: ignore[union-attr]

    assert not breaking(lambda path: path.stem != "interpreter" and any(map(starts_python, ast.walk(trees()[path]))))
