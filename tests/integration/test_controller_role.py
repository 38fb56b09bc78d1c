"""The wiring of the controller process, in this process."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from penstock.config.load import validate
from penstock.config.run import Config
from penstock.control.io.client import ControlClient
from penstock.journal.reader import replay
from penstock.records.ids import MemberId, PipelineName
from penstock.roles import controller
from penstock.roles.process import RoleProcess
from penstock.runtime.rundir import Endpoint, RunDir
from penstock.wire.messages import Register, Registered

P = PipelineName("p")


def config_with(**tables: dict[str, object]) -> Config:
    pipeline = {"name": P, "steps": 3, "env": {"name": "gymnasium"}, "model": {"kind": "mlp"}}
    return validate({"pipeline": [pipeline], **tables})


async def serve(run: RunDir, config: Config) -> tuple[RoleProcess, asyncio.Task[None], Endpoint]:
    process = RoleProcess(
        run=run,
        name="controller",
        member=MemberId("controller-1"),
        session="session",
        pipeline_name=PipelineName(""),
        index=0,
        config=config,
    )
    run.endpoint_path.unlink(missing_ok=True)
    serving = asyncio.ensure_future(controller.main(process))
    async with asyncio.timeout(30):
        while not run.endpoint_path.exists():
            assert not serving.done(), await serving
            await asyncio.sleep(0.005)
    endpoint = run.read_endpoint()
    assert endpoint is not None
    return process, serving, endpoint


async def stop(process: RoleProcess, serving: asyncio.Task[None]) -> None:
    process.stop.request("the test is over")
    await asyncio.wait_for(serving, 30)
    process.progress.close()


async def test_it_listens_on_the_configured_address_only(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "", "test")
    process, serving, endpoint = await serve(run, config_with(control={"host": "127.0.0.2"}))
    assert endpoint.host == "127.0.0.2"
    _, writer = await asyncio.open_connection("127.0.0.2", endpoint.port)
    writer.close()
    await writer.wait_closed()
    with pytest.raises(OSError):
        await asyncio.to_thread(socket.create_connection, ("127.0.0.1", endpoint.port), 5.0)
    await stop(process, serving)


async def test_it_takes_snapshots_as_configured_and_starts_from_them(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "", "test")
    config = config_with(journal={"snapshot_every_events": 5})
    process, serving, _ = await serve(run, config)
    async with asyncio.timeout(30):
        for number in range(4):
            member = MemberId(f"w{number}")
            client = ControlClient(run.endpoint_path, run.token(), P, member, unreachable_timeout_s=5.0)
            registered = await client.call(Register(P, member, role="rollout", pid=1, host_id="host"))
            assert isinstance(registered, Registered)
            await client.close()
        while not replay(run.journal_path).seq:  # noqa: ASYNC110 - one of the next ticks
            await asyncio.sleep(0.02)
    await stop(process, serving)
    process, serving, _ = await serve(run, config)
    client = ControlClient(run.endpoint_path, run.token(), P, MemberId("w0"), unreachable_timeout_s=5.0)
    status = await client.page("status", 10.0)
    await client.close()
    await stop(process, serving)
    assert status["pipelines"][P]["workers_alive"] == 4
