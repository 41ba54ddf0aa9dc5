"""What the store holds of a run, as values: runs, attempts at rounds, accepted results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from edge_sdk.protocol import messages
from edge_sdk.protocol.messages import Kind
from edge_server.config import RunConfig


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as it stands in the store: ``round`` rounds are done; hashes name blobs.

    ``multiples`` is the plan of augmentation by class; None before there is one.
    """

    id: str
    fleet: str
    config: RunConfig
    bundle: str
    model: str
    state: str
    round: int
    ended: bool
    created: float
    multiples: dict[int, float] | None = None


@dataclass(frozen=True, slots=True)
class WorkKey:
    """The key of work that has no row."""

    run: str
    round: int
    attempt: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """A result that counts: its device, the hash of its bytes, its weight n_k, its size in bytes, its hop.

    ``round`` is that of the model that it began with: an earlier one than it counts in where it was buffered.
    ``held`` says whether its bytes are kept.
    """

    device: str
    hash: str
    examples: int
    size: int
    hop: int = 0
    round: int = 0
    held: bool = True


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One attempt at a round, or at the calibration after the last one (of kind ``statistics``).

    ``status`` is ``open``, ``aggregated`` or ``repeated``; ``chains`` is empty where there are no mediators.
    ``noise_seed`` is what the noise is drawn from; None without noise. With ``state_before`` the state and
    the model before the round are kept, so that a replay may begin with it.
    """

    run: str
    round: int
    attempt: int
    kind: Kind
    status: str
    wanted: int
    selected: list[str]
    chains: list[list[str]]
    exponents: dict[str, int]
    model_before: str
    model_after: str | None
    figures: dict[str, Any] | None
    noise_seed: bytes | None = None
    state_before: str | None = None


Key: TypeAlias = RoundRow | WorkKey | messages.Key
"""What names a piece of work by run, round, attempt and kind."""
