"""The common part of all processes of a run: run directory, configuration, signals, failure report."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import uvloop

from penstock.config.load import load
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.control.io.client import ControlClient
from penstock.control.io.sidecar import Sidecar
from penstock.errors import ADVICE, LocalProtocolError, PenstockError, sentence_of
from penstock.payload.io.fetch import WIRES, Transport
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.served import served
from penstock.payload.io.shm import SYSTEM_RANDOM, Ring
from penstock.payload.io.wire_client import Wire
from penstock.records.ids import PipelineName
from penstock.records.payload import RingAddress
from penstock.records.section import LOOPBACK
from penstock.runtime.lag import LagMonitor
from penstock.runtime.logs import configure
from penstock.runtime.member import RunMember, StoppedAtStart
from penstock.runtime.process import raise_file_limit
from penstock.runtime.run_token import receive
from penstock.runtime.rundir import NO_SPACE, RunDir

log = logging.getLogger(__name__)

UNEXPECTED = 70
"""Exit code of a process that died of an unexpected error."""

TRACEBACK_CHARACTERS = 4000
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, kw_only=True)
class RoleProcess(RunMember):
    """A member with the configuration of its run."""

    config: Config
    random: Random = SYSTEM_RANDOM
    """The source of names that must not collide."""
    pid: int = field(default_factory=os.getpid)
    ring_directory: str = DIRECTORY

    @property
    def pipeline(self) -> PipelineSection:
        """The pipeline this process belongs to."""
        for section in self.config.pipeline:
            if section.name == self.pipeline_name:
                return section
        raise LocalProtocolError(
            f"{self.name} was started for pipeline {self.pipeline_name!r}, which is not configured"
        )

    def client(self) -> ControlClient:
        """This process's calls to the controller."""
        return ControlClient(
            self.run.endpoint_path,
            self.run.token(),
            PipelineName(self.pipeline.name),
            self.member,
            unreachable_timeout_s=self.config.control.reconnect_s,
        )

    def heartbeat(self) -> Sidecar:
        """Starts a separate process that reports this process's progress."""
        return Sidecar.start(
            self.run.endpoint_path,
            self.run.token(),
            PipelineName(self.pipeline.name),
            self.member,
            self.progress,
            every_s=self.config.control.heartbeat_every_s,
        )

    def served(self, ring: Ring) -> AbstractContextManager[RingAddress]:
        """Serves a ring of this process; yields its address."""
        return served(ring, self.config.payload, self.run.token())

    def wires(self) -> Mapping[Transport, Callable[[], Wire]]:
        """The transports of payloads from other hosts."""
        return WIRES

    def lag_monitor(self) -> LagMonitor:
        """Watches this process's loop as configured."""
        return LagMonitor(self.name, self.config.lag)


RoleMain = Callable[[RoleProcess], Coroutine[Any, Any, None]]
"""The wiring of a role."""


def run_role(main: RoleMain, options: argparse.Namespace) -> int:
    """Runs a role to its end. An error becomes the process's failure report and its exit code."""
    run = RunDir.open(options.run_dir)
    if options.token_fd is not None:
        run.hold_token(receive(options.token_fd))
    configure(options.name, level=logging.INFO)  # to standard error, which the supervisor redirects to the log file
    raise_file_limit()
    try:
        process = RoleProcess(
            run=run,
            config=listening_on(load(run.config_path), options.host),
            name=options.name,
            member=options.member,
            session=options.session,
            pipeline_name=options.pipeline or PipelineName(""),
            index=options.index,
        )
        uvloop.run(_with_signals(main, process))
    except StoppedAtStart:
        log.info("stopped before its start was complete")
        return 0
    except PenstockError as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=True)
        return _report_failure(run, options.name, type(error).__name__, str(error), error.exit_code)
    except BaseException as error:  # also an exit that the user's code requested: it must not count as success
        log.exception("unexpected %s", type(error).__name__)
        if isinstance(error, OSError) and error.errno in NO_SPACE_ERRORS:
            return NO_SPACE
        if isinstance(error, OSError) and error.errno in ADVICE:
            return _report_failure(run, options.name, "RunFailed", sentence_of(error), UNEXPECTED)
        trace = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
        return _report_failure(run, options.name, type(error).__name__, f"{error}\n{trace}", UNEXPECTED)
    log.info("ended gracefully")
    return 0


def listening_on(config: Config, host: str) -> Config:
    """The configuration with `host` in place of loopback addresses; unchanged if `host` is empty."""
    sections = {
        name: section.model_copy(update={"host": host})
        for name, section in (("control", config.control), ("payload", config.payload))
        if host and section.host == LOOPBACK
    }
    return config.model_copy(update=sections)


def _report_failure(run: RunDir, name: str, kind: str, sentence: str, exit_code: int) -> int:
    """Writes the failure report and returns the exit code, which alone reports the cause if the disk is full."""
    try:
        run.write_failure(name, kind, sentence, exit_code)
    except OSError as error:
        log.error("this failure report could not be written: %s", error)
        return NO_SPACE if error.errno in NO_SPACE_ERRORS else exit_code
    return exit_code


async def _with_signals(main: RoleMain, process: RoleProcess) -> None:
    process.stop.install()
    await main(process)
