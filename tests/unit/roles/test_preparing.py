"""Prompts that compute for long leave the worker's interpreter; all others stay."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from penstock.roles.preparing import MEASURED_PROMPTS, PromptsByCpuTime


class Slow:
    alphabet = "ab"

    def __init__(self, seconds: float, wait: Any) -> None:
        self.seconds, self.wait = seconds, wait

    def prompt(self, position: int) -> str:
        self.wait(self.seconds)
        return f"here {position}"


class Elsewhere:
    def prompt(self, position: int) -> str:
        return f"elsewhere {position}"


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def join(name: str = "preparation") -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10.0)


@pytest.mark.parametrize(
    ("wait", "seconds", "leaves"), [(compute, 0.006, True), (compute, 0, False), (time.sleep, 0.006, False)]
)
def test_only_prompts_that_compute_for_long_are_read_elsewhere(wait: Any, seconds: float, leaves: bool) -> None:
    prompts: Any = PromptsByCpuTime(Slow(seconds, wait), Elsewhere)  # type: ignore[arg-type]
    read = [prompts.prompt(position) for position in range(MEASURED_PROMPTS)]
    assert read == [f"here {position}" for position in range(MEASURED_PROMPTS)]
    join()
    assert prompts.prompt(99) == ("elsewhere 99" if leaves else "here 99")
    assert prompts.alphabet == "ab"


def test_prompts_that_cannot_be_read_elsewhere_are_read_here(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise TypeError("cannot pickle 'module' object")

    prompts: Any = PromptsByCpuTime(Slow(0.006, compute), broken)
    for position in range(2 * MEASURED_PROMPTS):
        assert prompts.prompt(position) == f"here {position}"
        join()
    assert caplog.text.count("still read in this process") == 1
