"""A server and its devices in threads of one process, and a device written by hand to misbehave."""

import secrets
import threading
from dataclasses import dataclass, field

from waiting import until

from edge_sdk import EdgeClient, Engine
from edge_sdk.protocol import Chunk, Incoming, Topics, decode_chunk, encode_chunk, reference
from edge_sdk.protocol.messages import (
    Finished,
    Grant,
    Join,
    Leave,
    Offer,
    Receipt,
    Taken,
    Task,
    Welcome,
    decode_from_device,
    decode_from_server,
    encode,
    key_of,
    kind_of,
)
from edge_sdk.tensors import decode
from edge_sdk.transport import MemoryBroker, Received
from edge_server import RunConfig, Server

FLEET = "f"
DEADLINE = 60.0


class Thread(threading.Thread):
    """A thread whose result or error is given to who waits for it."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work, self._result, self._error = work, None, None
        self.start()

    def run(self):
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self, seconds=DEADLINE):
        self.join(seconds)
        assert not self.is_alive(), f"not over within {seconds:.0f} s"
        if self._error is not None:
            raise self._error
        return self._result


class Fleet:
    """One fleet over one MemoryBroker; every thread is over when the ``with`` block is."""

    def __init__(self, folder):
        self.folder, self.broker = folder, MemoryBroker()
        self.sniffed = Probe(self.broker, "#")
        self.status = []
        self._ends = []

    def config(self, **settings):
        least = {"rounds": 1, "participants": 1, "lr": 0.1, "batch_size": 8, "evaluation": "none"}
        return RunConfig(**{"fleet": FLEET, "keep_updates": True, "grace": 3.0, **least, **settings})

    def serve(self, bundle, *, work_dir="server", eval_data=None, on_round=None, **settings):
        """Start a server; returns it and its thread once it listens."""
        server = Server(
            bundle,
            self.config(**settings),
            broker=self.broker.transport(),
            work_dir=self.folder / work_dir,
            eval_data=eval_data,
            on_round=on_round,
            on_status=self.status.append,
        )
        up = Probe(self.broker, f"edge/v1/{FLEET}/all/who")
        thread = Thread(server.run)
        self._ends.append((server.stop, thread))
        until(lambda: up.messages() or not thread.is_alive())
        return server, thread

    def client(self, name, data, **options):
        work_dir = options.pop("work_dir", name)
        transport = options.pop("transport", None) or self.broker.transport()
        engine = options.pop("engine", Engine(threads=1))
        return EdgeClient(
            transport,
            fleet=FLEET,
            data=data,
            work_dir=self.folder / "devices" / work_dir,
            device_id=name,
            engine=engine,
            **options,
        )

    def start(self, client, **options):
        """Run a client in a thread, which is returned."""
        thread = Thread(lambda: client.run(**options))
        self._ends.append((client.stop, thread))
        return thread

    def device(self, name, data, **options):
        """Make a client and run it; returns its thread."""
        return self.start(self.client(name, data, **options))

    def heard(self, kind, device="+"):
        """All messages of a kind so far, typed, from or to a device."""
        found = []
        for event in self.sniffed.messages():
            address = Topics(FLEET).parse(event.topic)
            if address.kind == kind.__name__.lower() and device in ("+", address.device):
                decode_message = decode_from_device if address.direction == "up" else decode_from_server
                found.append((address.device, decode_message(address.kind, event.payload)))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stop, _thread in self._ends:
            stop()
        for _stop, thread in self._ends:
            thread.join(DEADLINE)
            assert not thread.is_alive()


class Probe:
    """Everything on the topics of a pattern, from now on."""

    def __init__(self, broker, pattern):
        self._transport = broker.transport()
        self._transport.connect(None, timeout=1)
        self._transport.subscribe(pattern)
        self._seen = []

    def messages(self):
        while event := self._transport.receive(0):
            if isinstance(event, Received):
                self._seen.append(event)
        return list(self._seen)


class Deaf:
    """A transport on which some kinds of messages do not arrive."""

    def __init__(self, transport, deaf_to):
        self._transport, self.deaf_to = transport, deaf_to

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def receive(self, timeout):
        event = self._transport.receive(timeout)
        lost = isinstance(event, Received) and event.topic.rpartition("/")[2] in self.deaf_to
        return None if lost else event


@dataclass(eq=False)
class FakeDevice:
    """A device that says exactly what a test wants it to say."""

    broker: MemoryBroker
    id: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    install: str = field(default_factory=lambda: secrets.token_hex(16))
    boot: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self):
        self.transport = self.broker.transport()
        self.topics = Topics(FLEET)
        self.transport.connect(None, timeout=1)
        self.transport.subscribe(self.topics.down(self.id, "+"))
        self.transport.subscribe(self.topics.all("+"))

    def send(self, message):
        self.transport.publish(self.topics.up(self.id, kind_of(message)), encode(message))

    def join(self, examples=10, lease=None):
        """Join and return the welcome."""
        self.send(
            Join(
                sdk="0",
                install=self.install,
                boot=self.boot,
                nonce=self.nonce,
                examples=examples,
                lease=lease,
            )
        )
        return self.wait_for(Welcome)

    def leave(self):
        self.send(Leave(nonce=self.nonce))

    def wait_for(self, *kinds, where=lambda message: True):
        """The next message of one of these kinds; all before it are dropped."""

        def following():
            event = self.transport.receive(0.2)
            if not isinstance(event, Received):
                return None
            kind = self.topics.parse(event.topic).kind
            message = (
                decode_chunk(event.payload) if kind == "chunk" else decode_from_server(kind, event.payload)
            )
            return message if isinstance(message, kinds) and where(message) else None

        return until(following, DEADLINE, str(kinds))

    def task(self):
        return self.wait_for(Task)

    def take(self, task, examples=10):
        self.send(Taken(**key_of(task), examples=examples))

    def offer(self, task, data, *, examples=10, ref=None):
        offer = Offer(
            **key_of(task),
            blob=ref or reference(data, chunk=task.model.chunk),
            examples=examples,
        )
        self.send(offer)
        return offer

    def send_chunks(self, ref, data, start=0, stop=1):
        for index in range(start, stop):
            self.transport.publish(self.topics.up(self.id, "chunk"), encode_chunk(ref, data, index))

    def hand_in(self, task, data, *, examples=10):
        """Offer an update, send what is granted, and return the receipt."""
        offer = self.offer(task, data, examples=examples)
        while isinstance(answer := self.wait_for(Grant, Receipt), Grant):
            self.send_chunks(offer.blob, data, answer.start, answer.stop)
        return answer

    def download(self, ref, specs):
        """Ask the server for a blob and decode it."""
        incoming = Incoming(ref, limit=1 << 24)
        while (span := incoming.next_range(8)) is not None:
            self.send(Grant(blob=ref.hash, start=span[0], stop=span[1]))
            while incoming.missing_in(*span):
                incoming.add(self.wait_for(Chunk))
        return decode(incoming.finish(), specs)

    def end(self):
        """Wait for the end of the run, and leave."""
        self.wait_for(Finished)
        self.leave()
