"""A package that can be called: `penstock.train` is the trainer's package and the function that starts a run."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    _called: str

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)

    @property
    def _function(self) -> Any:
        module, _, name = self._called.partition(":")
        return getattr(import_module(module), name)

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For `help()` and for `?` in a notebook."""
        return self._function.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


def make_callable(package: str, called: str) -> None:
    """Makes a call of the imported package call `module:name`, which is imported at that time."""
    module = sys.modules[package]
    module._called = called  # type: ignore[attr-defined]
    module.__class__ = _CallablePackage
