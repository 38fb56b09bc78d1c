"""Starts one role: `python -m penstock.roles ROLE RUN_DIR --name NAME`.

Before anything heavy is imported, the kernel is set to kill this process with the supervisor: importing torch takes
seconds, and a supervisor killed in those seconds must leave no process behind.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path

from penstock.runtime.parent import die_with_parent


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m penstock.roles")
    parser.add_argument(
        "role",
        choices=(
            *("controller", "rollout_worker", "rollout_rank", "engine_rank", "trainer", "trainer_rank", "metrics_sink"),
        ),
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True, help="names the log file and the failure report")
    parser.add_argument("--member", required=True, help="names this incarnation of the process")
    parser.add_argument("--session", required=True, help="names this start of the run")
    parser.add_argument("--parent", type=int, help="the process to die with")
    parser.add_argument("--token-fd", type=int, help="a descriptor with the run's token; default: that of this user")
    parser.add_argument("--host", default="", help="listen on this address instead of loopback")
    parser.add_argument("--pipeline")
    parser.add_argument("--index", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.parent is not None:
        die_with_parent(options.parent)
    from penstock.roles.process import run_role

    return run_role(importlib.import_module(f"penstock.roles.{options.role}").main, options)


def finished(code: int) -> int:
    """The exit code for an immediate exit: the interpreter's own shutdown after torch takes seconds, or hangs. The role
    has closed everything within its time limits."""
    logging.shutdown()
    return code


if __name__ == "__main__":
    os._exit(finished(main()))
