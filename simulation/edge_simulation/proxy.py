"""A TCP proxy between MQTT clients and their broker: it counts what passes, and breaks it on purpose.

Faults are of connections (cut, also in the middle of a packet; stalled; delayed) and of whole PUBLISH
packets (doubled, reordered), in both directions, and never such that a client has to hang up for an error
of protocol:

- A copy is a PUBLISH of its own. At QoS 1 it gets a packet id that is not in use, from 65535 down, and the
  proxy keeps the PUBACK of it from the sender, who knows nothing of the copy.
- A reordered PUBLISH lets one to three later ones pass, or waits for half a second. MQTT keeps the order of
  messages within a topic; this does not. Other packets pass as they come, PUBACKs too, which nobody checks
  for their order. A DISCONNECT waits for what is held back.
- PUBLISH packets of QoS 2, or with a topic alias in place of a topic (MQTT 5), pass as they are.

What comes may be 3.1.1 or 5, without TLS. A broker without 5 is had by ``newest=4``: on a CONNECT of 5 the
proxy hangs up, as brokers of 3.1.1 do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from edge_simulation.broker import HOST
from edge_simulation.packets import (
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBLISH,
    Publish,
    read_connect,
    read_puback,
    read_publish,
    take_packet,
)

Direction = Literal["up", "down"]
"""From a client to the broker, or from the broker to a client."""
OnPublish: TypeAlias = Callable[[str, Direction, str, bytes], None]

HOLD = 0.5
"""Seconds after which a PUBLISH that was held back goes on although none has passed it."""
_PASSED = 3
_READ = 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What befalls PUBLISH packets while it is set, in both directions.

    Attributes:
        duplicate: probability of a copy right behind the packet.
        reorder: probability that the packet is held back.
        delay: largest number of seconds for which what has been read is held; uniform from 0.
    """

    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Bytes of one connection at the client's socket; ``client`` is the id in its CONNECT."""

    client: str = ""
    up: int = 0
    down: int = 0


class Proxy:
    """Listens on the loopback interface inside its ``with`` block, and passes on to ``broker``.

    A client that comes while the broker is away is hung up on. Methods may be called by any thread.

    Args:
        broker: ``mqtt://HOST:PORT``.
        seed: of what is left to chance. Each connection, counted from the first, and direction has draws of
            its own, so that the same packets meet the same fate.
        on_publish: called with client id, direction, topic and payload of every PUBLISH that arrives, in the
            proxy's thread; copies are not told.
        newest: level of the newest MQTT that passes: 4 is 3.1.1.
    """

    def __init__(
        self, broker: str, *, seed: int = 0, on_publish: OnPublish | None = None, newest: int = 5
    ) -> None:
        parts = urlsplit(broker)
        self.broker = (parts.hostname or HOST, parts.port or 1883)
        self.port = 0
        self.newest = newest
        self.rates = Rates()
        self.traffic: list[Traffic] = []
        """Of all connections so far, in the order in which they came."""
        self.done: Counter[str] = Counter()
        """How many packets were doubled and reordered, and connections cut, and cut within a packet."""
        self._to_cut: list[tuple[str, Direction, int]] = []
        self._seed = seed
        self._on_publish = on_publish
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mqtt-proxy", daemon=True)
        self._server: asyncio.AbstractServer | None = None

    @property
    def url(self) -> str:
        """``mqtt://127.0.0.1:PORT``."""
        return f"mqtt://{HOST}:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, HOST, 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def clients(self) -> list[str]:
        """Ids of the clients that are connected now."""
        return sorted(connection.traffic.client for connection in list(self._connections))

    def cut(self, client: str = "") -> int:
        """Break the connections whose client id begins with ``client``; returns how many."""

        async def cut() -> int:
            chosen = self._chosen(client)
            for connection in chosen:
                connection.abort()
            self.done["cut"] += len(chosen)
            return len(chosen)

        return self._call(cut())

    def cut_within(self, client: str, direction: Direction, *, at_least: int = 0) -> None:
        """Break a connection in the middle of the next PUBLISH of ``at_least`` bytes, of such a client.

        It need not be connected yet. ``done["cut within up"]`` and ``done["cut within down"]`` count what has
        happened.
        """
        self._to_cut.append((client, direction, at_least))

    def is_last(self, traffic: Traffic, direction: Direction, size: int) -> bool:
        """Whether the connection is to end in the middle of this PUBLISH; the next one lives."""
        for cut in self._to_cut:
            client, its, at_least = cut
            if traffic.client.startswith(client) and its == direction and size >= at_least:
                self._to_cut.remove(cut)
                self.done[f"cut within {direction}"] += 1
                return True
        return False

    def stall(self, seconds: float, client: str = "") -> int:
        """Pass nothing on, in neither direction, for ``seconds``; returns on how many connections."""

        async def stall() -> int:
            chosen = self._chosen(client)
            for connection in chosen:
                connection.stalled_until = time.monotonic() + seconds
            return len(chosen)

        return self._call(stall())

    def _chosen(self, client: str) -> list[_Connection]:
        return [c for c in self._connections if c.traffic.client.startswith(client)]

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back = await asyncio.open_connection(*self.broker)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(self, f"{self._seed}/{len(self.traffic)}", (reader, writer), back)
        self.traffic.append(connection.traffic)
        self._connections.add(connection)
        try:
            # asyncio logs a server's task that ends cancelled as if that were a mistake.
            with contextlib.suppress(asyncio.CancelledError):
                await connection.run()
        finally:
            self._connections.discard(connection)

    def arrived(self, traffic: Traffic, direction: Direction, publish: Publish) -> None:
        """A PUBLISH is here."""
        if self._on_publish is not None:
            self._on_publish(traffic.client, direction, publish.topic, publish.payload)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Way:
    """One direction of a connection."""

    direction: Direction
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    random: random.Random
    buffer: bytearray = field(default_factory=bytearray)
    held: list[tuple[int, bytes]] = field(default_factory=list)
    """Packets that wait, each with how many have yet to pass it."""
    unacknowledged: set[int] = field(default_factory=set)
    copies: set[int] = field(default_factory=set)


class _Connection:
    """A client's connection and the one to the broker that is made for it."""

    def __init__(
        self,
        proxy: Proxy,
        seed: str,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.traffic = Traffic()
        self.stalled_until = 0.0
        self._proxy = proxy
        self._version = 4
        self._up = _Way("up", client[0], broker[1], random.Random(f"{seed}/up"))
        self._down = _Way("down", broker[0], client[1], random.Random(f"{seed}/down"))

    def abort(self) -> None:
        """Break both connections; what is not sent yet is lost."""
        for way in (self._up, self._down):
            way.writer.transport.abort()

    async def run(self) -> None:
        """Pass on until either side ends, then end the other."""
        ways = [asyncio.ensure_future(self._pass_on(way)) for way in (self._up, self._down)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for side in (self._up, self._down):
                side.writer.close()

    async def _pass_on(self, way: _Way) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    data = await asyncio.wait_for(way.reader.read(_READ), HOLD if way.held else None)
                except asyncio.TimeoutError:
                    self._release(way)
                    continue
                if way is self._up:
                    self.traffic.up += len(data)
                if delay := self._proxy.rates.delay:
                    await asyncio.sleep(way.random.uniform(0, delay))
                while (left := self.stalled_until - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                if not data:
                    self._release(way)
                    return
                way.buffer += data
                while packet := take_packet(way.buffer):
                    if not self._take(way, packet):
                        return
                await way.writer.drain()

    def _take(self, way: _Way, packet: bytes) -> bool:
        """Pass a packet on as the rates have it; False if the connection is to end with half of it."""
        kind = packet[0] >> 4
        if kind == CONNECT:
            self._version, self.traffic.client = read_connect(packet)
            if self._version > self._proxy.newest:
                return False
        elif kind == PUBACK and self._is_of_copy(way, packet):
            return True
        elif kind == DISCONNECT:
            self._release(way)
        publish = read_publish(packet, self._version) if kind == PUBLISH else None
        if publish is None:
            self._write(way, packet)
            return True
        self._proxy.arrived(self.traffic, way.direction, publish)
        if publish.id is not None:
            way.unacknowledged.add(publish.id)
        if self._proxy.is_last(self.traffic, way.direction, len(packet)):
            self._write(way, packet[: len(packet) // 2])
            return False
        if publish.qos < 2 and publish.topic:
            self._pass_by_chance(way, publish)
        else:
            self._write(way, packet)
        return True

    def _pass_by_chance(self, way: _Way, publish: Publish) -> None:
        rates, packets = self._proxy.rates, [publish.packet]
        if way.random.random() < rates.duplicate:
            packets.append(self._copy(way, publish))
            self._proxy.done["duplicate"] += 1
        if way.random.random() < rates.reorder:
            self._proxy.done["reorder"] += 1
            passed = way.random.randint(1, _PASSED)
            way.held += [(passed, packet) for packet in packets]
            return
        for packet in packets:
            self._write(way, packet)
        way.held = [(left - 1, packet) for left, packet in way.held]
        for left, packet in way.held:
            if left <= 0:
                self._write(way, packet)
        way.held = [(left, packet) for left, packet in way.held if left > 0]

    def _copy(self, way: _Way, publish: Publish) -> bytes:
        if publish.id is None:
            return publish.packet
        fresh = next(number for number in range(65535, 0, -1) if number not in way.unacknowledged)
        way.unacknowledged.add(fresh)
        way.copies.add(fresh)
        return publish.with_id(fresh)

    def _is_of_copy(self, way: _Way, puback: bytes) -> bool:
        number = read_puback(puback)
        other = self._down if way is self._up else self._up
        other.unacknowledged.discard(number)
        if number not in other.copies:
            return False
        other.copies.discard(number)
        return True

    def _release(self, way: _Way) -> None:
        for _, packet in way.held:
            self._write(way, packet)
        way.held = []

    def _write(self, way: _Way, data: bytes) -> None:
        if way.writer.is_closing():
            return
        if way is self._down:
            self.traffic.down += len(data)
        way.writer.write(data)
