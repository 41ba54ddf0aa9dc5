"""Long local training over a crash or a reboot: it goes on after the last epoch that was kept."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import msgspec

from edge_sdk.errors import RunError
from edge_sdk.manifest import Manifest
from edge_sdk.protocol.messages import Task
from edge_sdk.runtime import Runtime
from edge_sdk.tensors import decode, encode, sha256
from edge_sdk.workspace import Workspace

KEEP_EVERY = 30.0
"""Least seconds from one epoch that is kept to the next: a phone's flash memory wears out by writing."""


@dataclass(slots=True)
class Checkpoints:
    """The epochs of one task's training in ``runtime`` that are kept in ``workspace``.

    The same training is one of the same model, data and settings, whatever the attempt: the updates agree.
    """

    workspace: Workspace
    task: Task
    examples: int
    runtime: Runtime
    _kept_at: float = field(default_factory=time.monotonic, init=False)

    @property
    def _training(self) -> str:
        same = msgspec.structs.replace(self.task, attempt=0, nonce="", deadline=0)
        return sha256(msgspec.json.encode([same, self.examples], order="sorted"))

    def resume(self, manifest: Manifest) -> int:
        """Bring the runtime, which has the received weights, to the last epoch kept; how many are done."""
        halfway = self.workspace.halfway
        if halfway is None or halfway.training != self._training:
            return 0
        weights = self.workspace.blob(halfway.weights)
        velocity = self.workspace.blob(halfway.velocity) if halfway.velocity else None
        if weights is None or (halfway.velocity and velocity is None):
            return 0
        self.runtime.go_on(decode(weights, manifest.specs))
        if velocity is not None:
            self.runtime.set_velocity(decode(velocity, manifest.trainable))
        return halfway.epochs

    def keep(self, epochs: int) -> None:
        """``epochs`` are done, and more are to come."""
        if time.monotonic() - self._kept_at < KEEP_EVERY:
            return
        velocity = self.runtime.get_velocity()
        # Without room for this there may be room for the update yet.
        with contextlib.suppress(RunError):
            self.workspace.set_halfway(
                self._training,
                epochs,
                encode(self.runtime.get_weights()),
                encode(velocity) if velocity else None,
            )
        self._kept_at = time.monotonic()
