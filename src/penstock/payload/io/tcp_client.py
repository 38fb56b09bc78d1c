"""The exchange over TCP, client's side: pooled connections, ports in turn, one deadline per call."""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

import xxhash

from penstock.errors import Aborted, LocalProtocolError, RemoteProtocolError, Transient
from penstock.payload.exchange import MAX_TEXT_BYTES, STATUS, Ack, Code, hello, parse_status, request
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.rotation import Rotation
from penstock.payload.io.timed_socket import TimedSocket
from penstock.payload.ports import Fault
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress

CHUNK_BYTES = 1 << 18
"""Received and hashed piece by piece, so that the hash finds the bytes still in the cache."""


class _Broken(Transient):
    """A call that ended in a way that says something about the port. Never leaves this module."""

    def __init__(self, fault: Fault, detail: str, answered: bool = False) -> None:
        super().__init__(detail)
        self.fault: Fault = fault
        self.detail = detail
        self.answered = answered
        """At least one byte had arrived."""


class _Pooled(NamedTuple):
    connection: TimedSocket
    born: float


class TcpClient:
    """Reads payloads from any number of servers. Thread-safe; every call blocks until its deadline at most."""

    def __init__(
        self,
        token: str,
        buffers: Buffers,
        *,
        max_age_s: float = 90.0,
        keep_per_port: int = 8,
        connect_s: float = 3.0,
        rotation: Rotation | None = None,
        verify: bool = True,
    ) -> None:
        """`max_age_s` must lie below the servers' idle limit, so that no connection is used just as it is evicted."""
        self._token = token
        self._buffers = buffers
        self._max_age_s = max_age_s
        self._keep_per_port = keep_per_port
        self._connect_s = connect_s
        self._rotation = rotation or Rotation()
        self._verify = verify
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[_Pooled]] = {}
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(pooled) for pooled in self._idle.values())
        return f"<TcpClient {idle} idle connections, {self._rotation!r}>"

    def read(
        self, address: RingAddress, ref: PayloadRef, deadline: float, tried: set[int], cancellation: Cancellation
    ) -> Received | Failure:
        """One call for one payload, complete and checked by `deadline` (monotonic), or the reason why not.

        `tried` holds the ports already tried for this payload; the one used now is added.
        """
        if self._closed:
            raise LocalProtocolError("this payload client is closed")
        host, ports = address.host, address.tcp_ports
        port = self._rotation.choose(host, ports, avoid=tried)
        tried.add(port)
        try:
            answer = self._call(host, port, ref, deadline, cancellation)
        except Aborted as error:
            return Failure("cancelled", str(error))
        except _Broken as broken:
            if cancellation.reason is not None:
                return Failure("cancelled", cancellation.reason)
            self._rotation.failed(host, ports, port, broken.fault)
            return Failure(broken.fault, f"{host}:{port}: {broken.detail}")
        self._rotation.succeeded(host, ports, port)
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [pooled for group in self._idle.values() for pooled in group]
            self._idle.clear()
        for pooled in idle:
            pooled.connection.close()

    def _call(
        self, host: str, port: int, ref: PayloadRef, deadline: float, cancellation: Cancellation
    ) -> Received | Failure:
        pooled = self._pooled(host, port)
        if pooled is not None:
            try:
                return self._exchange(pooled, host, port, ref, deadline, cancellation)
            except _Broken as broken:
                # An old connection may have been closed by the other side since: that says nothing about the port.
                if broken.answered or broken.fault == "timed_out" or cancellation.reason is not None:
                    raise
                self._drop_idle(host, port)
        return self._exchange(self._connect(host, port, deadline), host, port, ref, deadline, cancellation)

    def _exchange(
        self, pooled: _Pooled, host: str, port: int, ref: PayloadRef, deadline: float, cancellation: Cancellation
    ) -> Received | Failure:
        connection = pooled.connection
        memory = self._buffers.take(STATUS.size + max(ref.size_bytes, MAX_TEXT_BYTES))
        registered = None
        try:
            registered = cancellation.register(connection.break_off)
            _send(connection, request(ref), deadline)
            # Status and body lie one after the other, so that a small payload takes a single system call.
            whole = memory.data[: STATUS.size + ref.size_bytes]
            arrived = _receive(connection, whole, 0, STATUS.size, deadline)
            status = parse_status(whole[: STATUS.size], ref)
            if status.code is not Code.OK:
                whole = memory.data[: STATUS.size + status.length]
                _receive(connection, whole, arrived, len(whole), deadline)
                answer = _refusal(status.code, bytes(whole[STATUS.size :]).decode(errors="replace"))
            else:
                digest = self._receive_body(connection, whole, arrived, ref, deadline)
                if digest != ref.digest:
                    _send(connection, bytes([Ack.RELEASED]), deadline)
                    raise _Broken("corrupt", f"body hashes to {digest:016x}, expected {ref.digest:016x}", answered=True)
                _send(connection, bytes([Ack.CONSUMED]), deadline)
                answer = Received(whole[STATUS.size :].toreadonly(), memory)
                memory = None
        except RemoteProtocolError as error:
            connection.close()
            raise _Broken("protocol", str(error), answered=True) from error
        except BaseException:
            connection.close()
            raise
        finally:
            if registered is not None:
                cancellation.unregister(registered)
            if memory is not None:
                self._buffers.give_back(memory)
        self._keep(host, port, pooled)
        return answer

    def _receive_body(
        self, connection: TimedSocket, whole: memoryview, arrived: int, ref: PayloadRef, deadline: float
    ) -> int:
        """Receive the rest of `whole`; the digest of the body in it, computed while the bytes are in the cache."""
        if not self._verify or ref.digest == 0:
            _receive(connection, whole, arrived, len(whole), deadline)
            return ref.digest
        hasher = xxhash.xxh3_64(whole[STATUS.size : arrived])
        while arrived < len(whole):
            before = arrived
            arrived = _receive(connection, whole, before, min(before + CHUNK_BYTES, len(whole)), deadline)
            hasher.update(whole[before:arrived])
        return hasher.intdigest()

    def _connect(self, host: str, port: int, deadline: float) -> _Pooled:
        try:
            timeout_s = min(self._connect_s, max(1e-3, deadline - time.monotonic()))
            connection = TimedSocket(socket.create_connection((host, port), timeout_s))
        except TimeoutError as error:
            raise _Broken("timed_out", "no connection in time") from error
        except OSError as error:
            raise _Broken("refused", f"cannot connect: {error}") from error
        try:
            _send(connection, hello(self._token), deadline)
        except BaseException:
            connection.close()
            raise
        return _Pooled(connection, time.monotonic())

    def _pooled(self, host: str, port: int) -> _Pooled | None:
        now = time.monotonic()
        too_old: list[_Pooled] = []
        fresh = None
        with self._lock:
            idle = self._idle.get((host, port), [])
            while idle and fresh is None:
                pooled = idle.pop()
                if now - pooled.born < self._max_age_s:
                    fresh = pooled
                else:
                    too_old.append(pooled)
        for pooled in too_old:
            pooled.connection.close()
        return fresh

    def _keep(self, host: str, port: int, pooled: _Pooled) -> None:
        with self._lock:
            idle = self._idle.setdefault((host, port), [])
            if not self._closed and len(idle) < self._keep_per_port:
                idle.append(pooled)
                return
        pooled.connection.close()

    def _drop_idle(self, host: str, port: int) -> None:
        with self._lock:
            idle = self._idle.pop((host, port), [])
        for pooled in idle:
            pooled.connection.close()


def _refusal(code: Code, reason: str) -> Failure:
    if code is Code.REFUSED:
        raise _Broken("protocol", f"the server refused our hello: {reason}", answered=True)
    return Failure("stale" if code is Code.STALE else "busy", reason)


def _send(connection: TimedSocket, data: bytes, deadline: float) -> None:
    try:
        connection.send(deadline, data)
    except TimeoutError as error:
        raise _Broken("timed_out", "could not send in time") from error
    except OSError as error:
        raise _Broken("reset", f"while sending: {error}") from error


def _receive(connection: TimedSocket, view: memoryview, at: int, until: int, deadline: float) -> int:
    """Receive into `view` from `at` on, at least up to `until`; how far it is filled now."""
    try:
        while at < until:
            # Up to a status anything may come; a body is known to be as long as announced.
            chunk = view[at : at + CHUNK_BYTES]
            count = connection.receive_into(deadline, chunk, whole=at >= STATUS.size)
            if count == 0:
                raise _Broken("truncated" if at else "reset", f"closed after {at} of {len(view)} bytes", at > 0)
            at += count
    except TimeoutError as error:
        raise _Broken("timed_out", f"{at} of {len(view)} bytes in time", at > 0) from error
    except OSError as error:
        raise _Broken("reset", f"after {at} of {len(view)} bytes: {error}", at > 0) from error
    return at
