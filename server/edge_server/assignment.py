"""What is asked of a cohort: the tasks, which results are taken, what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.protocol import chunk_count
from edge_sdk.protocol.messages import Key as MessageKey
from edge_sdk.protocol.messages import Kind, Offer, Ref, Task
from edge_server.cohort import Cohort, Standing
from edge_server.config import RunConfig
from edge_server.relay import Relay
from edge_server.rows import AcceptedResult, Key

MOST_CHUNKS = 1 << 18
"""Chunks of a result: the largest, in chunks of 8 KiB."""
MAX_CHUNK = 1 << 20
"""Bytes of a chunk that any broker in use delivers."""


@dataclass(slots=True, kw_only=True)
class Assignment:
    """Work that is out with a cohort under one key. What is special to a kind of work is in its subclass.

    Attributes:
        key: run, round, attempt and kind.
        began: the server's monotonic seconds.
        hashes: by device, the SHA-256 of its last accepted result.
    """

    key: Key
    cohort: Cohort | Relay
    config: RunConfig
    bundle: Bundle
    began: float
    examples: int = 0
    bytes_up: int = 0
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """What is asked for."""
        return self.key.kind

    @property
    def turns(self) -> int:
        """How many deadlines may follow one another."""
        return 1

    @property
    def rolling(self) -> bool:
        """Whether each device has a deadline of its own."""
        return isinstance(self.cohort, Relay)

    def round_of(self, device: str) -> int:  # noqa: ARG002 - a buffer's devices began at different ones
        """The round that the device works for."""
        return self.key.round

    def hop_of(self, device: str) -> int:  # noqa: ARG002 - chains look at the device
        """Which turn of its chain the device has now; 0 where there are no chains."""
        return 0

    def lacks(self, device: str, blob: str) -> bool:  # noqa: ARG002 - buffers look
        """Whether a device wants a model that no server has any more; its task is then another."""
        return False

    def is_keyed(self, device: str, key: MessageKey) -> bool:
        """Whether a message of ``device`` is about this work, and about its present turn in it."""
        mine = (self.key.run, self.key.round, self.key.attempt, self.key.kind, self.hop_of(device))
        return key.key == mine

    def task(self, device: str, nonce: str, *, bundle: Ref, model: Ref, left: float) -> Task:
        """What ``device`` is asked, with ``left`` seconds until the deadline."""
        return Task(
            run=self.key.run,
            round=self.round_of(device),
            attempt=self.key.attempt,
            kind=self.key.kind,
            hop=self.hop_of(device),
            nonce=nonce,
            bundle=bundle,
            model=model,
            deadline=max(int(left), 1),
            **self.details(device),
        )

    def details(self, device: str) -> Mapping[str, Any]:
        """The fields of the task that belong to this kind of work."""
        raise NotImplementedError

    def largest(self) -> int:
        """Bytes that a result may have."""
        raise NotImplementedError

    def check(self, device: str, data: bytes, examples: int) -> Mapping[str, Any]:
        """The tensors of a result made from so many examples, validated whole.

        Raises:
            TensorError: they are not what was asked for, or cannot be true.
        """
        raise NotImplementedError

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Use a result that :meth:`check` has passed and the store has."""
        raise NotImplementedError

    def add(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Use a result and note that it is in."""
        self.take(result, tensors)
        self.count(result)

    def count(self, result: AcceptedResult) -> None:
        """Note that a result is in."""
        self.cohort.accept(result.device)
        self.hashes[result.device] = result.hash
        self.examples += result.examples
        self.bytes_up += result.size

    def close(self) -> None:
        """No further result is taken."""

    def refusal(self, device: str, offer: Offer, declared: int | None) -> str | None:
        """Why the result that ``offer`` announces will not be taken; None if it will.

        Args:
            declared: the examples that the device said it would use when it took the task.
        """
        standing, number = self.cohort.standing(device), self.key.round
        if offer.blob.size > self.largest():
            return f"a result of {offer.blob.size} bytes is over this model's limit of {self.largest()}"
        if chunk_count(offer.blob) > MOST_CHUNKS or offer.blob.chunk > MAX_CHUNK:
            return f"a result in chunks of {offer.blob.chunk} bytes cannot be taken: use those of the task"
        if standing is None:
            return f"this device was not asked in round {number}"
        if standing == Standing.ACCEPTED:
            return f"this device has delivered another update in round {number}"
        if standing == Standing.DROPPED:
            return f"this device has declined round {number}, or its update was refused"
        if self.cohort.complete:
            return f"round {number} has all its updates"
        if not 1 <= offer.examples <= self.config.max_examples:
            return f"{offer.examples} examples are not between 1 and {self.config.max_examples}"
        if declared is not None and offer.examples > declared:
            return f"{offer.examples} examples, but {declared} were declared for this round"
        return None
