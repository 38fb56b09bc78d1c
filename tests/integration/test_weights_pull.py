"""Versions over TCP: verified, bounded, refused without the token, undisturbed by removal."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.errors import RemoteProtocolError, Stale, Transient
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.weights.io.digest import digest_of
from penstock.weights.io.files import FileSource, FileTransport, Publisher
from penstock.weights.io.pull import (
    MAGIC,
    REPLY,
    REQUEST,
    ArtifactServer,
    NearestTransport,
    PullTransport,
    token_digest,
)

TOKEN = b"secret"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        **{f"layer.{i}": torch.randn(257, 300 + i, generator=generator) for i in range(12)},
        "empty": torch.zeros(0),
        "scalar": torch.tensor(float(seed)),
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ArtifactServer]:
    server = ArtifactServer(tmp_path, TOKEN, keep=2)
    yield server
    server.close(5.0)
    assert threads() == []


def threads() -> list[str]:
    for thread in threading.enumerate():
        if thread.name.startswith("weights-"):
            thread.join(5.0)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]


def published(run_dir: Path, server: ArtifactServer, version: int) -> Manifest:
    publisher = Publisher(run_dir, "l1", keep=1, bucket_bytes=900_000, host_id="there", addresses=(server.address,))
    manifest = publisher.publish(Version(version), tensors(version))
    server.offer(manifest)
    return manifest


@pytest.mark.parametrize("streams", [1, 4])
def test_what_was_published_arrives(tmp_path: Path, server: ArtifactServer, streams: int) -> None:
    transport = PullTransport(TOKEN, streams=streams)
    first = published(tmp_path, server, 1)
    got = transport.fetch(first, 20.0)
    assert digest_of(got) == first.digest
    where = {name: tensor.data_ptr() for name, tensor in got.items()}
    second = published(tmp_path, server, 2)
    got = transport.fetch(second, 20.0)
    assert digest_of(got) == second.digest
    assert where == {name: tensor.data_ptr() for name, tensor in got.items()}  # the same memory again
    assert server.served_bytes == 2 * sum(tensor.nbytes for tensor in tensors(1).values())


def test_a_removed_version_is_served_while_it_is_offered_and_stale_afterwards(
    tmp_path: Path, server: ArtifactServer
) -> None:
    transport = PullTransport(TOKEN)
    first = published(tmp_path, server, 1)
    published(tmp_path, server, 2)
    assert not (tmp_path / first.directory).exists()
    assert digest_of(transport.fetch(first, 20.0)) == first.digest
    published(tmp_path, server, 3)
    with pytest.raises(Stale, match="newest"):
        transport.fetch(first, 20.0)


def test_clients_without_the_token_are_refused(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    with pytest.raises(RemoteProtocolError, match="refused"):
        PullTransport(b"guess").fetch(manifest, 20.0)
    assert server.refusals > 0
    assert server.served_bytes == 0


@pytest.mark.parametrize(
    ("bucket", "offset", "length"), [(99, 0, 1), (0, 0, 1 << 62), (0, (1 << 64) - 1, 2), (0, 0, 0)]
)
def test_ranges_outside_the_files_are_refused(
    tmp_path: Path, server: ArtifactServer, bucket: int, offset: int, length: int
) -> None:
    manifest = published(tmp_path, server, 1)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(REQUEST.pack(MAGIC, token_digest(TOKEN), manifest.digest.encode(), bucket, offset, length))
        assert REPLY.unpack(connection.recv(REPLY.size, socket.MSG_WAITALL))[0] == 2
        assert connection.recv(1) == b""


def test_a_dead_server_and_a_silent_one_are_transient(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Transient):
            PullTransport(TOKEN).fetch(msgspec.structs.replace(manifest, addresses=(address,)), 0.3)
    with pytest.raises(Transient):
        PullTransport(TOKEN).fetch(msgspec.structs.replace(manifest, addresses=(address,)), 5.0)


def test_a_transfer_cut_off_in_the_middle_is_transient_and_the_next_succeeds(
    tmp_path: Path, server: ArtifactServer
) -> None:
    manifest = published(tmp_path, server, 1)
    cut: list[int] = []

    def cutting(listener: socket.socket) -> None:
        """A man in the middle that lets half a megabyte through."""
        client, _ = listener.accept()
        host, port = server.address.split(":")
        with client, socket.create_connection((host, int(port))) as upstream:
            upstream.sendall(client.recv(REQUEST.size, socket.MSG_WAITALL))
            left = 100_000
            while left > 0:
                data = upstream.recv(min(left, 65536))
                client.sendall(data)
                left -= len(data)
            cut.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=cutting, args=(listener,), daemon=True)
        thread.start()
        transport = PullTransport(TOKEN, streams=1)
        addresses = (f"127.0.0.1:{listener.getsockname()[1]}", server.address)
        manifest = msgspec.structs.replace(manifest, addresses=addresses)
        with pytest.raises(Transient):
            transport.fetch(manifest, 20.0)
        thread.join(10.0)
    assert cut
    assert digest_of(transport.fetch(manifest, 20.0)) == manifest.digest  # from the other address


class Wire:
    """A link between replicas and a server that can be cut: then nothing passes on it, and nobody is told. The
    connections of a link that was cut carry nothing after it is healed either."""

    def __init__(self, server: ArtifactServer) -> None:
        host, port = server.address.split(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.intact = threading.Event()
        self.intact.set()
        self.passed = self.connections = 0
        self.cut_after: int | None = None
        """Bytes that pass to the replica before the link is cut."""
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                upstream = socket.create_connection(self._upstream)
                self._ends += [client, upstream]
                for source, target in ((client, upstream), (upstream, client)):
                    thread = threading.Thread(target=self._carry, args=(source, target), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source.getpeername() == self._upstream:
                    self.passed += len(data)
                    if self.cut_after is not None and self.passed > self.cut_after:
                        self.cut_after = None
                        self.intact.clear()
                if not self.intact.is_set():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self.intact.set()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10.0)
        for end in self._ends:
            end.close()


@pytest.mark.parametrize("cut_after", [0, 300_000], ids=["before the reply", "in the middle"])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_transfer_over_a_link_that_was_cut_goes_on_once_it_is_healed(
    tmp_path: Path, server: ArtifactServer, streams: int, cut_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = published(tmp_path, server, 1)
    wire = Wire(server)
    wire.cut_after = cut_after
    through = msgspec.structs.replace(manifest, addresses=(wire.address,))
    transport = PullTransport(TOKEN, streams=streams, idle_s=0.2)
    with ThreadPoolExecutor(1, thread_name_prefix="weights-test") as thread:
        pulling = thread.submit(transport.fetch, through, 300.0)
        deadline = time.monotonic() + 20.0
        while not caplog.records and not pulling.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not wire.intact.is_set(), "the link was cut"
        wire.heal()
        assert digest_of(pulling.result(20.0)) == manifest.digest
    assert f"nothing arrives from ('127.0.0.1', {wire.address.split(':')[1]})" in caplog.text
    assert wire.connections > streams
    wire.close()


def test_a_link_that_stays_cut_is_given_up_at_the_deadline(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    wire = Wire(server)
    wire.cut_after = 0
    through = msgspec.structs.replace(manifest, addresses=(wire.address,))
    with pytest.raises(Transient, match="before the deadline"):
        PullTransport(TOKEN, streams=1, idle_s=0.05).fetch(through, 0.3)
    assert not wire.intact.is_set()
    wire.close()


def asking(server: ArtifactServer, manifest: Manifest, bucket: int, length: int) -> socket.socket:
    """A replica's connection that has asked for these bytes."""
    host, port = server.address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=20.0)
    connection.sendall(REQUEST.pack(MAGIC, token_digest(TOKEN), manifest.digest.encode(), bucket, 0, length))
    return connection


def test_a_transfer_is_not_ended_for_idle_strangers(tmp_path: Path) -> None:
    server = ArtifactServer(tmp_path, TOKEN, max_strangers=4)
    manifest = Publisher(tmp_path, "l1", addresses=(server.address,)).publish(
        Version(1), {"w": torch.arange(8 << 20, dtype=torch.int32)}
    )
    server.offer(manifest)
    host, port = server.address.split(":")
    size = manifest.buckets[0].size_bytes
    with asking(server, manifest, 0, size) as pulling, contextlib.ExitStack() as stack:
        assert REPLY.unpack(pulling.recv(REPLY.size)) == (0, size)
        idle = [stack.enter_context(socket.create_connection((host, int(port)), 20.0)) for _ in range(70)]
        assert [connection.recv(1) for connection in idle[:66]] == [b""] * 66
        left = size
        while left and (data := pulling.recv(1 << 20)):
            left -= len(data)
        assert left == 0
    server.close(5.0)
    assert threads() == []


def test_any_number_of_replicas_pull_at_once(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(asking(server, manifest, 0, 1)) for _ in range(100)]
        answers = [replica.makefile("rb").read(REPLY.size + 1) for replica in replicas]
        assert {REPLY.unpack(answer[:-1]) for answer in answers} == {(0, 1)}
        assert digest_of(PullTransport(TOKEN).fetch(manifest, 20.0)) == manifest.digest


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (REPLY.pack(0, 5), RemoteProtocolError, "announced 5 bytes where"),
        (REPLY.pack(7, 0), RemoteProtocolError, "refused to serve"),
        (REPLY.pack(1, 0), Stale, "no longer offered"),
        (REPLY.pack(0, 257 * 300 * 4), Transient, "closed before the end"),
        (REPLY.pack(0, 257 * 300 * 4) + b"x", Transient, "closed after 1 of"),
        (REPLY.pack(0, 1)[:3], Transient, "closed after 3 of"),
        (b"", Transient, "closed without an answer"),
    ],
    ids=["length", "status", "gone", "no body", "part of a body", "part of a reply", "nothing"],
)
def test_a_server_that_answers_wrongly_is_an_exact_error(
    tmp_path: Path, server: ArtifactServer, reply: bytes, error: type[Exception], words: str
) -> None:
    manifest = published(tmp_path, server, 1)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(REQUEST.size, socket.MSG_WAITALL)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        lying = msgspec.structs.replace(manifest, addresses=(address,))
        with pytest.raises(error, match=words):
            PullTransport(TOKEN, streams=1).fetch(lying, 20.0)
        thread.join(10.0)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:http"])
def test_an_address_that_is_none_is_named(tmp_path: Path, server: ArtifactServer, address: str) -> None:
    manifest = msgspec.structs.replace(published(tmp_path, server, 1), addresses=(address,))
    with pytest.raises(RemoteProtocolError, match=f"names address '{address}', expected host:port"):
        PullTransport(TOKEN).fetch(manifest, 20.0)


def test_bytes_changed_on_the_way_are_noticed(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    path = tmp_path / manifest.directory / manifest.buckets[1].file
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    for streams in (1, 3):
        with pytest.raises(RemoteProtocolError, match=manifest.buckets[1].file):
            PullTransport(TOKEN, streams=streams).fetch(manifest, 20.0)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = ArtifactServer(tmp_path, TOKEN, keep=2)
    for version in range(5):
        PullTransport(TOKEN).fetch(published(tmp_path, server, version), 20.0)
    server.close(5.0)
    assert threads() == []
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """This process can open no more than about `count` files in addition to those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def many_buckets(run_dir: Path, version: int) -> Manifest:
    publisher = Publisher(run_dir, "l1", keep=1, bucket_bytes=64)
    return publisher.publish(Version(version), {f"w{i:03d}": torch.full((16,), float(version)) for i in range(60)})


def test_no_more_than_the_kept_versions_are_ever_open(tmp_path: Path, server: ArtifactServer) -> None:
    with spare_descriptors(2 * 60 + 20):
        for version in range(4):
            server.offer(many_buckets(tmp_path, version))


def test_a_lack_of_descriptors_is_named_with_what_to_do(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = many_buckets(tmp_path, 0)
    with spare_descriptors(40), pytest.raises(RemoteProtocolError, match=r"cannot be opened.*ulimit -n"):
        server.offer(manifest)


def test_parallel_streams_do_not_mix_where_the_file_system_has_no_sendfile(
    tmp_path: Path, server: ArtifactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        refused.append(arguments)
        raise OSError(errno.EINVAL, "Invalid argument")

    refused: list[object] = []
    monkeypatch.setattr(os, "sendfile", refuse)
    weights = {f"w{i:02d}": torch.randn(1 << 18) for i in range(16)}
    manifest = Publisher(tmp_path, "l1", addresses=(server.address,)).publish(Version(0), weights)
    server.offer(manifest)
    for _ in range(5):
        assert digest_of(PullTransport(TOKEN, streams=4).fetch(manifest, 20.0)) == manifest.digest
    assert refused


def test_the_nearest_way_is_taken(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    here = NearestTransport("there", FileTransport(tmp_path), PullTransport(TOKEN))
    assert digest_of(here.fetch(manifest, 20.0)) == manifest.digest
    assert server.served_bytes == 0
    away = NearestTransport("elsewhere", FileTransport(tmp_path), PullTransport(TOKEN))
    assert digest_of(away.fetch(manifest, 20.0)) == manifest.digest
    assert server.served_bytes > 0


def test_an_open_source_outlives_the_server(tmp_path: Path, server: ArtifactServer) -> None:
    manifest = published(tmp_path, server, 1)
    with FileSource(tmp_path, manifest) as source:
        server.close(5.0)
        buffer = bytearray(10)
        assert list(source.pieces(0, 0, memoryview(buffer)))
