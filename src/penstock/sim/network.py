"""The simulated network between processes and the controller: latency, loss, resets, repetition, partitions."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Literal, Protocol

from penstock.control.io.client import MSGPACK
from penstock.control.io.memory import Answer
from penstock.payload.io.memory import Trouble
from penstock.sim.loop import CURRENT, Process, VirtualLoop
from penstock.wire.codec import Codec
from penstock.wire.messages import Reply, Request


class NetworkConditions(Protocol):
    """Present conditions of the network. Probabilities are per message."""

    latency_s: float
    lose: float
    reset: float
    repeat: float
    corrupt: float


class Served(Protocol):
    """Called with every answered request and its answer, at the time of the answer."""

    def __call__(self, client: str, request: Request, reply: Reply) -> None: ...


class Network:
    """One controller at a time; any number of clients. Messages of one client may overtake each other."""

    def __init__(self, loop: VirtualLoop, random: Random, conditions: NetworkConditions, served: Served) -> None:
        self._loop = loop
        self._random = random
        self._served = served
        self._context = contextvars.Context()
        self._requests: Codec[Request] = Codec(Request)
        self._replies: Codec[Reply] = Codec(Reply)
        self._open: dict[int, tuple[Process, Process, Callable[[str], None]]] = {}
        self._numbers = iter(range(1 << 62))
        self.conditions = conditions
        self.cut: dict[str, int] = {}
        """Processes without a network, and the number of faults that cut each off."""
        self.server: Process | None = None
        self._call: Callable[[Request], Awaitable[Reply]] | None = None
        self.calls = 0
        self.lost = 0
        self.repeated = 0

    def serve(self, call: Callable[[Request], Awaitable[Reply]]) -> None:
        """The current process becomes the server, until it dies."""
        process = CURRENT.get()
        assert process is not None
        self.server, self._call = process, call
        process.at_death.append(lambda: self._server_ended(process))

    def close(self) -> None:
        """Closes the port; calls in flight are still answered."""
        self.server = self._call = None

    def link(self, process: Process) -> NetworkLink:
        return NetworkLink(self, process)

    def send(
        self, client: Process, body: bytes, answered: Callable[[Answer], None], failed: Callable[[str], None]
    ) -> None:
        if client.state != "running":
            failed("this process has ended")
            return
        self.calls += 1
        times = 2 if self._strikes(self.conditions.repeat) else 1
        self.repeated += times - 1
        for _ in range(times):
            self._after(self._arrive, client, body, answered, failed)

    def _arrive(
        self, client: Process, body: bytes, answered: Callable[[Answer], None], failed: Callable[[str], None]
    ) -> None:
        if self._is_lost(client):
            return
        server, call = self.server, self._call
        if server is None or call is None or not server.alive:
            self._after(self._notify, client, failed, "cannot connect: connection refused")
            return
        if self._strikes(self.conditions.reset):
            self._after(self._notify, client, failed, "the connection was lost: reset by peer")
            return
        number = next(self._numbers)
        self._open[number] = (server, client, failed)

        def begin() -> None:
            server.run(self._answer(number, call, client, body, answered))

        self._loop.call_soon(begin, context=server.context)

    async def _answer(
        self,
        number: int,
        call: Callable[[Request], Awaitable[Reply]],
        client: Process,
        body: bytes,
        answered: Callable[[Answer], None],
    ) -> None:
        request = self._requests.decode(body)
        try:
            reply = await call(request)
            self._served(client.name, request, reply)
            answer = (200, MSGPACK, self._replies.encode(reply))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - as an HTTP server answers
            answer = (500, b"text/plain", f"{type(error).__name__}: {error}".encode())
        finally:
            self._open.pop(number, None)
        self._after(self._return, client, answered, answer)

    def _return(self, client: Process, answered: Callable[[Answer], None], answer: Answer) -> None:
        if not self._is_lost(client):
            self._notify(client, answered, answer)

    def _notify(self, client: Process, callback: Callable[..., None], value: object) -> None:
        if client.alive:
            self._loop.call_soon(callback, value, context=client.context)

    def _server_ended(self, process: Process) -> None:
        if self.server is process:
            self.close()
        for number, (server, client, failed) in list(self._open.items()):
            if server is process:
                del self._open[number]
                self._after(self._notify, client, failed, "the connection was lost")

    def _is_lost(self, client: Process) -> bool:
        lost = client.name in self.cut or self._strikes(self.conditions.lose)
        self.lost += lost
        return lost

    def _strikes(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _after(self, function: Callable[..., None], *arguments: object) -> None:
        delay_s = self.conditions.latency_s * (0.5 + self._random.random())
        self._loop.call_later(delay_s, function, *arguments, context=self._context)


class NetworkLink:
    """A `Link` of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def send(self, body: bytes, answered: Callable[[Answer], None], failed: Callable[[str], None]) -> None:
        self._network.send(self._process, body, answered, failed)


class PayloadNet:
    """The same conditions for payloads over the network, and faults of single ports."""

    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self.owners: dict[int, Process] = {}
        self.sick: dict[int, Trouble] = {}
        self.troubles: Counter[str] = Counter()

    @property
    def latency_s(self) -> float:
        return self._network.conditions.latency_s * (0.5 + self._random.random())

    def trouble(self, port: int, stage: Literal["connect", "ask"]) -> Trouble | None:
        found = self._trouble(port, stage)
        if found is not None:
            self.troubles[found] += 1
        return found

    def _trouble(self, port: int, stage: Literal["connect", "ask"]) -> Trouble | None:
        client, owner, conditions = CURRENT.get(), self.owners[port], self._network.conditions
        cut = self._network.cut
        if owner.state == "stopped" or owner.name in cut or (client is not None and client.name in cut):
            return "silent"
        if port in self.sick:
            return self.sick[port]
        if self._strikes(conditions.reset):
            return "reset"
        if stage == "ask" and self._strikes(conditions.lose):
            return "confirmation lost"
        return "corrupt" if stage == "ask" and self._strikes(conditions.corrupt) else None

    def _strikes(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability
