"""Event loops for the user's coroutines, each on its own thread: one that blocks its loop blocks nothing of ours."""

from __future__ import annotations

import asyncio
import threading


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """A loop on a new daemon thread. After `stop` it cancels its tasks and closes; one that is blocked does so when it
    continues."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name=name, daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
    finally:
        loop.close()
