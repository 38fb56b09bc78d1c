"""Functions and classes passed as objects, made importable for the processes of a run.

An object of a module is passed by its import path. For one that was defined in a script or a notebook, the source is
written to a module in the run directory, together with the imports, functions and constants that it uses. Code that the
source does not define completely (lambdas, closures, objects) is rejected with a fix in the error message.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import linecache
import os
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time
from numbers import Number
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from penstock.errors import ConfigError

TO_DO = "define it with `def` or `class` at the top level of the script, the notebook or a module"


class UserCode:
    """Collects the code that the processes must be able to import."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        """Directories from which the user's own modules were imported."""
        self._sources: dict[str, str] = {}
        """By name, in the order of definition."""
        self._objects: dict[str, Any] = {}
        """The object of each name."""

    @property
    def text(self) -> str:
        """The text of the module to write; empty if all code can be imported from its own modules."""
        if not self._sources:
            return ""
        head = '"""Written by penstock.train from the code it was given."""\n\nfrom __future__ import annotations\n'
        return head + "\n\n".join(["", *self._sources.values()])

    @property
    def module(self) -> str:
        """The name of the written module; it depends on the text."""
        return f"penstock_code_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def name(self, value: Any, role: str) -> str:
        """`module:name`, or `:name` for the written module, whose name `resolve` adds."""
        owner = f"{role} {getattr(value, '__qualname__', value)!r}"
        if not isinstance(value, FunctionType | type):
            raise ConfigError(f"{owner} is a {type(value).__name__}, expected a function or a class; {TO_DO}")
        if "<lambda>" in value.__qualname__ or "<locals>" in value.__qualname__:
            kind = "a lambda" if "<lambda>" in value.__qualname__ else "defined inside a function"
            raise ConfigError(f"{owner} is {kind}, which other processes cannot import; {TO_DO}")
        module = sys.modules.get(value.__module__)
        if value.__module__ != "__main__" and module is not None and _found_in(module, value):
            self._remember_path(module)
            return f"{value.__module__}:{value.__qualname__}"
        if not self._is_known(value.__name__, value, owner):
            self._write(value, owner)
        return f":{value.__qualname__}"

    def resolve(self, tree: Any) -> Any:
        """The settings with every function and class replaced by its import path."""
        named = self._named(tree, "")
        return _completed(named, self.module)

    def _named(self, tree: Any, key: str) -> Any:
        if isinstance(tree, Mapping):
            return {name: self._named(value, f"{key}.{name}" if key else name) for name, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._named(value, key) for value in tree]
        if callable(tree):
            return _Written(self.name(tree, key))
        if tree is not None and not isinstance(tree, str | Number | os.PathLike | date | time):
            kind = type(tree).__name__
            raise ConfigError(
                f"{key} is an object of class {kind}, which other processes do not have; pass the class itself, and "
                f"its arguments as options: environment={{'name': {kind}, 'options': {{…}}}}"
            )
        return tree

    def _remember_path(self, module: ModuleType) -> None:
        """Modules beside the script or the notebook are on its Python path, but not on that of the processes."""
        root = sys.modules.get(module.__name__.partition(".")[0], module)
        origin = getattr(root, "__file__", None)
        if origin is None:
            return
        folder = Path(origin).resolve().parent
        folder = folder.parent if hasattr(root, "__path__") else folder
        installed = any(part in ("site-packages", "dist-packages") for part in folder.parts)
        if not installed and not folder.is_relative_to(Path(sys.base_prefix)) and folder not in self.paths:
            self.paths.append(folder)

    def _write(self, value: FunctionType | type, owner: str) -> None:
        """Adds its source, after that of all names it refers to."""
        source, namespace = _source(value, owner)
        self._objects[value.__name__] = value  # first: it may refer to itself
        for name in _global_names(source):
            if name in namespace and not self._is_known(name, namespace[name], owner):
                self._write_global(name, namespace[name], owner)
        self._sources[value.__name__] = source

    def _is_known(self, name: str, value: Any, owner: str) -> bool:
        """Raises `ConfigError` if the name belongs to another object: all are written to one module."""
        if name in self._objects and self._objects[name] is not value:
            raise ConfigError(f"{owner} needs two different objects named {name!r}; rename one of them")
        return name in self._objects

    def _write_global(self, name: str, value: Any, owner: str) -> None:
        self._objects[name] = value
        if isinstance(value, ModuleType):
            self._remember_path(value)
            self._sources[name] = f"import {value.__name__} as {name}\n"
            return
        home = sys.modules.get(getattr(value, "__module__", None) or "")
        if home is not None and home.__name__ != "__main__" and _found_in(home, value):
            self._remember_path(home)
            self._sources[name] = f"from {home.__name__} import {value.__qualname__} as {name}\n"
        elif isinstance(value, FunctionType | type) and value.__name__ == name:
            self._write(value, owner)
        elif isinstance(value, re.Pattern):
            self._sources[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})\n"
        elif _is_literal(value):
            self._sources[name] = f"{name} = {value!r}\n"
        else:
            raise ConfigError(
                f"{owner} uses {name!r}, a {type(value).__name__} of this session, which other processes do not have; "
                "create it inside the function, or put both into a module and import that"
            )


class _Written(str):
    """An import path whose module may still be missing."""


def _completed(tree: Any, module: str) -> Any:
    if isinstance(tree, dict):
        return {name: _completed(value, module) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_completed(value, module) for value in tree]
    if isinstance(tree, _Written):
        return f"{module}{tree}" if tree.startswith(":") else str(tree)
    return tree


def _found_in(module: ModuleType, value: Any) -> bool:
    name = getattr(value, "__qualname__", "")
    return bool(name) and "." not in name and getattr(module, name, None) is value


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return False


def _source(value: FunctionType | type, owner: str) -> tuple[str, Mapping[str, Any]]:
    """Its source text with decorators, and the names it can refer to.

    A class is searched in the file of its methods: the cells of a notebook are files, but not of a module. A class
    without methods is searched in the file of its module, and in the cells, the last one first.
    """
    for function in _functions(value):
        first = function.__code__.co_firstlineno
        found = _definition(linecache.getlines(function.__code__.co_filename), value.__name__, first)
        if found:
            return found, function.__globals__
    if isinstance(value, type):
        namespace = vars(sys.modules[value.__module__])
        with contextlib.suppress(OSError, TypeError):
            return textwrap.dedent(inspect.getsource(value)), namespace
        cells = [name for name in linecache.cache if "ipykernel" in name or name.startswith("<ipython")]
        for cell in reversed(cells):
            if found := _definition(linecache.getlines(cell), value.__name__):
                return found, namespace
    raise ConfigError(f"the source of {owner} cannot be found; {TO_DO}, or put it into a module and import that")


def _definition(lines: Sequence[str], name: str, inside: int | None = None) -> str:
    """The text of the function or class of that name at the top level of a file, around the line `inside`; empty if
    there is none."""
    with contextlib.suppress(SyntaxError):  # a cell with an IPython magic
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if inside is None or start <= inside <= (node.end_lineno or inside):
                    return "".join(lines[start - 1 : node.end_lineno])
    return ""


def _functions(value: FunctionType | type) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield inspect.unwrap(value)  # type: ignore[misc]
        return
    for member in vars(value).values():
        inner: Callable[..., Any] | None = getattr(member, "__func__", None) or getattr(member, "fget", None)
        found = inner or member
        own = isinstance(found, FunctionType) and found.__qualname__.startswith(f"{value.__qualname__}.")
        if own and found.__code__.co_filename != "<string>":  # not generated by a decorator such as dataclass
            yield found


def _global_names(source: str) -> list[str]:
    """Names that the source uses but does not define."""
    names: dict[str, None] = {}

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                names[symbol.get_name()] = None
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(f"from __future__ import annotations\n{source}", "<source>", "exec"), True)
    return list(names)
