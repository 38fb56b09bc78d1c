"""Where the user's code stands: the line of a thread or of an asyncio task that runs it now."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

LINES = 2
"""Innermost lines in a sentence."""
_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHON = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def thread_location(thread: int) -> str:
    """The innermost lines of the user's code on a thread's stack, as `, at judge.py:31 ask`; empty if there is none."""
    frame = sys._current_frames().get(thread)
    frames = [*traceback.walk_stack(frame)] if frame is not None else []
    return _sentence(frames[::-1])


def task_location(task: asyncio.Task[Any]) -> str:
    """The same of a task, also where it awaits other coroutines. Any thread."""
    frames = [(frame, frame.f_lineno) for frame in task.get_stack()]
    awaited: Any = task.get_coro()
    while (awaited := getattr(awaited, "cr_await", None)) is not None and hasattr(awaited, "cr_frame"):
        if awaited.cr_frame is not None:
            frames.append((awaited.cr_frame, awaited.cr_frame.f_lineno))
    return _sentence(frames)


def traceback_location(trace: TracebackType | None) -> str:
    """The same of an exception's traceback."""
    return _sentence([*traceback.walk_tb(trace)])


def _sentence(frames: list[tuple[FrameType, int]]) -> str:
    """Of code that is neither Python's nor Penstock's; installed packages count only if nothing else is there."""
    found = [
        (code.co_filename, f", at {os.path.basename(code.co_filename)}:{line} {code.co_name}")
        for code, line in ((frame.f_code, line) for frame, line in frames)
        if not code.co_filename.startswith((_OURS, "<")) and not _in_python(code.co_filename)
    ]
    own = [line for path, line in found if not path.startswith(_INSTALLED)]
    return "".join(reversed((own or [line for _, line in found])[-LINES:]))


def _in_python(path: str) -> bool:
    return path.startswith(_PYTHON) and not path.startswith(_INSTALLED)
