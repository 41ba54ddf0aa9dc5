"""The state of a simulation in one file, from which it goes on after it was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_sdk.errors import RunError, TensorError
from edge_sdk.files import write_atomically
from edge_sdk.tensors import sha256
from edge_server.aggregation import State, Strategy
from edge_server.rounds import RoundResult
from edge_simulation.devices import Devices


class _Saved(msgspec.Struct):
    run: str
    rounds: list[RoundResult]
    steps: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where one run's state is kept.

    Args:
        path: of the file, which need not be there yet.
        fleet: whose run it is; another bundle, other settings or data of other sizes are another run.

    Raises:
        RunError: the devices keep a momentum of their own, or ε counts their rounds, which the file does
            not hold.
    """

    path: Path
    fleet: Devices

    def __post_init__(self) -> None:
        config = self.fleet.config
        if config.keep_momentum or config.codec != "fp32" or config.noise_multiplier:
            raise RunError(
                "a checkpoint does not hold what is kept of devices between rounds: leave it, or "
                "keep_momentum, codec and noise_multiplier, away"
            )

    def load(self, strategy: Strategy) -> tuple[State, list[RoundResult]] | None:
        """State and lines so far; the fleet's count of steps goes on. None if nothing was saved.

        Raises:
            RunError: the file holds another run, or none.
        """
        if not self.path.exists():
            return None
        manifest = self.fleet.bundle.manifest
        try:
            saved = msgspec.msgpack.decode(self.path.read_bytes(), type=_Saved)
            if saved.run != self._run():
                raise RunError(f"{self.path} holds a run with other settings or data: give another path")
            state = strategy.restore(saved.state, manifest.specs, manifest.rules)
        except (OSError, msgspec.DecodeError, TensorError) as error:
            raise RunError(f"{self.path} is not the checkpoint of a simulation: {error}") from None
        self.fleet.steps = saved.steps
        return state, saved.rounds

    def save(self, state: State, rounds: list[RoundResult]) -> None:
        """Replace the file."""
        saved = _Saved(self._run(), rounds, self.fleet.steps, state.to_bytes())
        write_atomically(self.path, msgspec.msgpack.encode(saved))

    def _run(self) -> str:
        described = [self.fleet.bundle.sha256, self.fleet.config, sorted(self.fleet.sizes.items())]
        return sha256(msgspec.json.encode(described))
