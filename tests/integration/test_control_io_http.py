"""The control port from outside: answers, waits, refusals, and everything a client without the token might send."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.control.controller import Controller as Machine
from penstock.control.events import Event
from penstock.control.io.http import STATUS_OF_REFUSAL, ControlApp, ControlServer
from penstock.control.io.service import ControlService
from penstock.control.io.waiting import MAX_WAIT_S
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.errors import ConfigError, PenstockError, RunFailed
from penstock.journal.reader import history
from penstock.journal.writer import Journal
from penstock.records.ids import MemberId, PipelineName, RunId, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.pool import OrderNumber
from penstock.records.rollout import Rollout
from penstock.records.weights import Manifest
from penstock.runtime.clock import SystemClock
from penstock.runtime.tasks import Tasks
from penstock.wire import messages
from penstock.wire.codec import MAX_MESSAGE_BYTES, decode_section
from penstock.wire.messages import Refused, Reply, Request
from profiles import examples

A = PipelineName("a")
W = MemberId("worker")
T = MemberId("trainer")
TOKEN = "a-secret"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
MAX_BODY = 200_000


@dataclass
class Controller:
    service: ControlService
    app: ControlApp
    server: ControlServer
    client: httpx.AsyncClient

    async def call(self, request: Request) -> Reply:
        answer = await self.client.post("/v1/call", content=msgspec.msgpack.encode(request), headers=AUTHORIZED)
        return msgspec.msgpack.decode(answer.content, type=Reply)

    def rejected(self, status: int) -> float | None:
        return self.app.registry.get_sample_value("penstock_control_rejected_total", {"status": str(status)})

    def fingerprint(self) -> tuple[int, bytes]:
        return self.service.journal.last_seq, self.service.controller.pipelines[A].snapshot()


@asynccontextmanager
async def controller(folder: Path) -> AsyncIterator[Controller]:
    journal = Journal(folder / "journal.sqlite", RunId("run"))
    control = PipelineControl(PipelineSettings(name=A, groups_per_step=2, group_size=2, max_staleness=0, steps=3))
    service = ControlService(Machine({A: control}), journal, SystemClock(), tick_s=3600)
    service.start()
    app = ControlApp(service, TOKEN, max_body_bytes=MAX_BODY)
    server = ControlServer(app)
    port = server.bind()
    try:
        async with Tasks() as tasks:
            tasks.spawn("service", service.run())
            tasks.spawn("http", server.serve())
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
                yield Controller(service, app, server, client)
            service.close()
            await server.stop(5)
            tasks.cancel()
        service.check()
    finally:
        journal.close(10)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path) as running:
        yield running


def register(member: MemberId = W, role: messages.Role = "rollout", step: StepIndex | None = None) -> Request:
    return messages.Register(A, member, role=role, pid=1, host_id="here", step=step)


def delivery(*samples: int, member: MemberId = W) -> Request:
    payload = PayloadRef("ring", 1, 0, 0, 10, 7)
    made = tuple(Rollout(SampleId(sample), Version(0), "", 1.0, 5, payload) for sample in samples)
    return messages.Deliver(A, member, rollouts=made)


def lease(request: int, samples: int = 2, wait_s: float = 0.0) -> Request:
    return messages.AskLease(A, W, request=request, samples=samples, version=Version(0), wait_s=wait_s)


# -- answers ------------------------------------------------------------------------------------------------------


async def test_a_sample_through_the_port(run: Controller) -> None:
    assert isinstance(await run.call(register()), messages.Registered)
    leased = await run.call(lease(1))
    assert isinstance(leased, messages.Leased)
    assert leased.verdict == "granted"
    samples = [sample for one in leased.leases for sample in one.samples]
    assert await run.call(lease(1)) == leased
    assert await run.call(delivery(*samples)) == messages.Delivered()


async def test_every_answer_to_a_change_is_on_disk_before_it_leaves(run: Controller) -> None:
    await run.call(register())
    await run.call(lease(1))
    tags = [msgspec.msgpack.decode(entry.body)["type"] for entry in history(run.service.journal.path)]
    assert tags[-2:] == ["register", "ask_lease"]


async def test_pages(run: Controller) -> None:
    await run.call(register())
    assert (await run.client.get("/healthz")).text == "ok"
    status = (await run.client.get("/v1/status", headers=AUTHORIZED)).json()
    assert status["pipelines"]["a"]["phase"] == "running"
    assert "a" in (await run.client.get("/v1/diagnosis", headers=AUTHORIZED)).json()
    assert "penstock_control_calls_total 1.0" in (await run.client.get("/metrics", headers=AUTHORIZED)).text


async def test_figures_of_members_appear_and_go_with_them(run: Controller) -> None:
    await run.call(register())
    await run.call(messages.ReportMetrics(A, W, values={"loop_lag_p99_s": 0.25}))
    assert run.service.status()["members"] == {"a/worker": {"loop_lag_p99_s": 0.25}}
    await run.call(messages.Unregister(A, W))
    assert run.service.status()["members"] == {}


async def test_what_is_known_is_exported_and_what_has_left_is_not(run: Controller) -> None:
    await run.call(register())
    await run.call(lease(1))
    await run.call(messages.ReportMetrics(A, W, values={"loop_lag_p99_s": 0.25, "odd name!": 2.0}))
    scraped = (await run.client.get("/metrics", headers=AUTHORIZED)).text
    assert 'penstock_pipeline_in_flight{pipeline="a"} 2.0' in scraped
    assert 'penstock_member_loop_lag_p99_s{member="a/worker"} 0.25' in scraped
    assert 'penstock_member_odd_name_{member="a/worker"} 2.0' in scraped
    await run.call(messages.Unregister(A, W))
    scraped = (await run.client.get("/metrics", headers=AUTHORIZED)).text
    assert 'penstock_pipeline_in_flight{pipeline="a"} 0.0' in scraped
    assert "penstock_member" not in scraped


# -- waiting ------------------------------------------------------------------------------------------------------


async def wait_until_held(run: Controller, kind: str) -> None:
    async with asyncio.timeout(20):
        while not run.service.waiting.statistics().get(kind):  # noqa: ASYNC110 - nothing to await: it is another's wait
            await asyncio.sleep(0.002)


async def test_a_batch_is_awaited_and_woken_by_the_delivery(run: Controller) -> None:
    await run.call(register())
    await run.call(register(T, "trainer", StepIndex(0)))
    leased = await run.call(lease(1, samples=4))
    assert isinstance(leased, messages.Leased)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(run.call(messages.AskBatch(A, T, StepIndex(0), wait_s=20)))
        await wait_until_held(run, "ask_batch")
        await run.call(delivery(*(sample for one in leased.leases for sample in one.samples)))
    answer = asking.result()
    assert isinstance(answer, messages.BatchReady)
    assert sum(len(group.samples) for group in answer.batch.groups) == 4


async def test_a_throttled_lease_is_awaited_and_woken_by_a_worker_that_leaves(run: Controller) -> None:
    other = MemberId("other")
    await run.call(register(other))
    await run.call(messages.AskLease(A, other, request=1, samples=4, version=Version(0)))
    await run.call(register())
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(run.call(lease(1, wait_s=20)))
        await wait_until_held(run, "ask_lease")
        await run.call(messages.Unregister(A, other, reason="done"))
    answer = asking.result()
    assert isinstance(answer, messages.Leased)
    assert answer.verdict == "granted"


async def test_a_wait_ends_with_its_time_and_with_the_desk(run: Controller) -> None:
    await run.call(register(T, "trainer", StepIndex(0)))
    brief = await run.call(messages.AskBatch(A, T, StepIndex(0), wait_s=0.01))
    assert isinstance(brief, messages.NotYet)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(run.call(messages.AskBatch(A, T, StepIndex(0), wait_s=1e9)))
        await wait_until_held(run, "ask_batch")
        run.service.close()
    assert isinstance(asking.result(), messages.NotYet)


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": ""},
    ],
)
async def test_without_the_token_nothing_is_told_and_it_is_counted(run: Controller, headers: dict[str, str]) -> None:
    before = run.fingerprint()
    for path in ("/v1/status", "/v1/diagnosis", "/metrics", "/nowhere"):
        assert (await run.client.get(path, headers=headers)).status_code == 401
    body = msgspec.msgpack.encode(register())
    assert (await run.client.post("/v1/call", content=body, headers=headers)).status_code == 401
    assert run.rejected(401) == 5
    assert run.fingerprint() == before


async def test_wrong_paths_and_methods(run: Controller) -> None:
    assert (await run.client.get("/v1/call", headers=AUTHORIZED)).status_code == 405
    assert (await run.client.post("/v1/status", headers=AUTHORIZED)).status_code == 405
    assert (await run.client.get("/../etc/passwd", headers=AUTHORIZED)).status_code == 404


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        (delivery(0), 410, "Stale"),
        (lease(1), 410, "Stale"),
        (messages.AskBatch(A, T, StepIndex(0)), 410, "Stale"),
        (messages.AskLease(PipelineName("b"), W, 1, 1, Version(0)), 422, "LocalProtocolError"),
        (messages.AskOrders(A, W, OrderNumber(0)), 410, "Stale"),
    ],
)
async def test_a_refusal_by_the_machines_is_a_4xx_with_its_reason(
    run: Controller, request_: Request, status: int, kind: str
) -> None:
    before = run.fingerprint()
    answer = await run.client.post("/v1/call", content=msgspec.msgpack.encode(request_), headers=AUTHORIZED)
    assert answer.status_code == status
    refused = msgspec.msgpack.decode(answer.content, type=Reply)
    assert isinstance(refused, Refused)
    assert refused.kind == kind
    assert refused.message
    assert run.fingerprint() == before


async def test_forged_and_repeated_samples_change_nothing(run: Controller) -> None:
    await run.call(register())
    await run.call(register(MemberId("thief")))
    leased = await run.call(lease(1))
    assert isinstance(leased, messages.Leased)
    before = run.fingerprint()
    forged = await run.call(delivery(10**12, -1))
    assert isinstance(forged, messages.Delivered)
    assert forged.refused == (10**12, -1)
    stolen = await run.call(delivery(leased.leases[0].samples[0], member=MemberId("thief")))
    assert isinstance(stolen, messages.Delivered)
    assert stolen.refused == (leased.leases[0].samples[0],)
    assert run.fingerprint() == before
    await run.call(delivery(leased.leases[0].samples[0]))
    after = run.fingerprint()
    assert after != before
    await run.call(delivery(leased.leases[0].samples[0]))
    assert run.fingerprint() == after


async def test_a_large_body_is_refused_by_its_header_before_it_is_sent(run: Controller) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", run.server.port)
    head = f"POST /v1/call HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 99999999999\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(20):
        assert b"413" in await reader.readline()
        await reader.read()  # and the connection is closed, though the body never came
    writer.close()
    await writer.wait_closed()


async def test_a_large_body_without_a_length_is_cut_off(run: Controller) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield bytes(50_000)

    try:
        answer = await run.client.post("/v1/call", content=endless(), headers=AUTHORIZED)
        assert answer.status_code == 413
    except httpx.TransportError:  # closed while we were still sending
        assert sent < 1000
    assert run.rejected(413) == 1


async def test_a_body_that_ends_early_is_refused(run: Controller) -> None:
    body = msgspec.msgpack.encode(register())
    reader, writer = await asyncio.open_connection("127.0.0.1", run.server.port)
    head = f"POST /v1/call HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
    before = run.fingerprint()
    writer.write(head.encode() + body[:-3])
    writer.write_eof()
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    await writer.wait_closed()
    assert run.fingerprint() == before


async def test_garbage_on_the_wire_harms_no_client(run: Controller) -> None:
    chance = random.Random(7)
    whole = (
        f"POST /v1/call HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 5\r\n\r\nabcde".encode()
    )
    before = run.fingerprint()
    for number in range(60):
        mangled = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            mangled[chance.randrange(len(mangled))] = chance.randrange(256)
        garbage = chance.randbytes(200) if number % 3 == 0 else bytes(mangled)
        reader, writer = await asyncio.open_connection("127.0.0.1", run.server.port)
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(20):
            answered = await reader.read()
        assert not answered or answered.startswith(b"HTTP/1.1 4")
        writer.close()
        await writer.wait_closed()
    assert (await run.client.get("/healthz")).text == "ok"
    assert run.fingerprint() == before


async def test_a_port_in_use_and_a_port_that_cannot_be(run: Controller) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{run.server.port}"):
        ControlServer(run.app, port=run.server.port).bind()
    with pytest.raises(ConfigError, match="cannot listen"):
        ControlServer(run.app, port=70_000).bind()
    with pytest.raises(ConfigError, match="cannot listen"):
        ControlServer(run.app, host="203.0.113.1").bind()


async def test_port_zero_is_a_real_port_on_loopback_only(run: Controller) -> None:
    assert run.server.port > 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", run.server.port)) == 0


async def test_a_broken_machine_fails_the_run_instead_of_going_on(run: Controller) -> None:
    def broken(event: Any, now: float) -> Any:
        raise KeyError("lost")

    run.service.controller.pipelines[A].handle = broken  # type: ignore[method-assign]
    answer = await run.call(register())
    assert isinstance(answer, Refused)
    assert answer.kind == "RunFailed"
    assert run.service.failed.is_set()
    assert "pipeline a failed at the event Register" in run.service.failure


async def test_a_machine_that_breaks_on_its_own_time_ends_the_desk_with_a_sentence(run: Controller) -> None:
    service = ControlService(Machine(run.service.controller.pipelines), ListedJournal(), SystemClock(), tick_s=0.001)

    def broken(event: Any, now: float) -> Any:
        raise KeyError("lost")

    service.controller.pipelines[A].handle = broken  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="pipeline a failed at the event TimePassed"):
        async with asyncio.timeout(20):
            await service.run()


async def test_a_full_disk_fails_the_run_and_promises_nothing(run: Controller) -> None:
    await run.call(register())
    run.service.journal.fail(RunFailed("the disk is full"))
    answer = await run.call(lease(1))
    assert isinstance(answer, Refused)
    assert (answer.kind, answer.message) == ("RunFailed", "the disk is full")
    assert run.service.failure == "the disk is full"


def test_the_document_has_every_path_and_every_refusal() -> None:
    document = (Path(__file__).parents[2] / "docs" / "protocols" / "control-http.md").read_text()
    for kind, status in STATUS_OF_REFUSAL.items():
        assert f"| `{kind}` | {status} |" in document
    app = ControlApp(ControlService(Machine({}), ListedJournal(), SystemClock()), TOKEN)
    for path in ("/v1/call", "/healthz", *app._pages):
        assert f"{path}`" in document
    assert f"({MAX_MESSAGE_BYTES // 2**20} MiB)" in document
    assert f"at most {MAX_WAIT_S:.0f} s" in document


# -- whatever a client might send ---------------------------------------------------------------------------------

VALID = [
    register(),
    register(T, "trainer", StepIndex(0)),
    lease(1),
    delivery(0, 1),
    messages.AskBatch(A, T, StepIndex(0)),
    messages.AckStep(A, T, StepIndex(0), metrics={"loss": 1.0}),
    messages.AckCheckpoint(A, T, StepIndex(1)),
    messages.PublishWeights(A, T, Manifest(Version(0), "l", "d", (), "weights/0")),
    messages.Heartbeat(A, W, 0.1, "generate"),
    messages.ReportMetrics(A, W, {"x": 1.0}),
    messages.Unregister(A, W),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def nearly_valid(draw: st.DrawFn) -> bytes:
    """A valid request with fields replaced, dropped or added: right enough to get far, wrong enough to hurt."""
    fields: dict[str, Any] = msgspec.to_builtins(draw(st.sampled_from(VALID)))
    for key in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        fields[key] = draw(trees)
    fields |= draw(st.dictionaries(st.text(max_size=6), trees, max_size=1))
    return msgspec.msgpack.encode(fields)


@st.composite
def flipped(draw: st.DrawFn) -> bytes:
    body = bytearray(msgspec.msgpack.encode(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))])


class ListedJournal:
    """The journal's part, without a disk."""

    def __init__(self) -> None:
        self.path = Path("nowhere")
        self.last_seq = 0
        self.uncommitted_for_s = 0.0
        self.events: list[tuple[float, bytes]] = []

    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int:
        self.events.append((at, event))
        self.last_seq += 1
        return self.last_seq

    async def committed(self, seq: int) -> None: ...

    async def flushed(self) -> None: ...

    def snapshot(self, states: Mapping[PipelineName, bytes]) -> None: ...

    def fail(self, failure: PenstockError) -> None: ...


@settings(max_examples=examples(500), deadline=None)
@given(
    bodies=st.lists(
        st.binary(max_size=200) | trees.map(msgspec.msgpack.encode) | nearly_valid() | flipped(), max_size=8
    )
)
@example(bodies=[b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000, b"\xdf\x7f\xff\xff\xff" * 9])
def test_fuzz_whatever_arrives_is_answered_and_the_books_still_balance(bodies: list[bytes]) -> None:
    """Straight into the application, as the port would. Every body gets a status; only 200 may change anything; what
    was journalled gives the same state again, bit for bit.
    """

    async def send_all() -> None:
        journal = ListedJournal()
        control = PipelineControl(PipelineSettings(name=A, groups_per_step=2, group_size=2, steps=3))
        service = ControlService(Machine({A: control}), journal, SystemClock())
        service.tick()
        app = ControlApp(service, TOKEN, max_body_bytes=MAX_BODY)
        for body in [*bodies, *(msgspec.msgpack.encode(request) for request in VALID)]:
            before = journal.last_seq, control.snapshot()
            status = await post(app, body)
            assert status in (200, 400, 409, 410, 413, 422)
            if status != 200:
                assert (journal.last_seq, control.snapshot()) == before
            assert not service.failure
            service.check()
        again = PipelineControl(control.settings)
        for at, event in journal.events:
            again.handle(msgspec.msgpack.decode(event, type=Event, dec_hook=decode_section), at)
        assert again.snapshot() == control.snapshot()

    asyncio.run(send_all())


async def post(app: ControlApp, body: bytes) -> int:
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-length", b"%d" % len(body))]
    async with asyncio.timeout(20):
        await app({"type": "http", "method": "POST", "path": "/v1/call", "headers": headers}, receive, send)
    return statuses[0]
