"""All that a run is: one typed table, from keyword arguments, the command line or a TOML file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edge_sdk.errors import RunError
from edge_sdk.manifest import Manifest
from edge_sdk.protocol import CHUNK_BYTES, check_id
from edge_sdk.protocol.messages import Fact
from edge_sdk.runtime import Optimiser
from edge_server.aggregation import (
    Noise,
    NoisySum,
    Precision,
    RobustMean,
    Strategy,
    WeightedSum,
    fedadam,
    fedavg,
    fedavgm,
    fedprox,
    plan_precision,
)

Seconds = Annotated[float, Meta(gt=0, le=10_000_000)]
Rate = Annotated[float, Meta(gt=0, le=1_000_000)]
Norm = Annotated[float, Meta(ge=0, le=1e30)]

STALENESS_UNIT = 256
MAX_COHORT = 4096
"""Most devices in a round: for as many, the fixed-point sum is exact with the default bounds."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run.

    Attributes:
        fleet: which devices are meant.
        rounds: aggregations until the run ends.
        strategy: how the server makes a model of a mean update: ``fedavg``; ``fedprox``, which is FedAvg
            with ``proximal``; ``fedavgm`` with ``momentum``, ``nesterov`` and ``server_lr``; ``fedadam``
            with ``server_lr``, β₁ in ``momentum``, ``beta2`` and ``tau``.
        selection: ``random``, or ``grouped``: one device a round of each of ``participants`` groups of
            like data (FLDG, arXiv 2201.12515).
        descriptor: what devices are grouped by: the ``hash`` of their mean feature (FLDG-L), or the mean
            ``feature`` itself, which says more of the data.
        chain: most devices behind one mediator, γ of Astraea (arXiv 1907.01132), 0 for no mediators. 5 is
            usual. A device that fails is skipped; nobody replaces it.
        chain_passes: how often a mediator goes through its devices in a round, E_m.
        augmentation: exponent α by which devices multiply the examples of classes below the mean, 0 for
            none; Astraea's .67 and 1. ``augmentation_stored``: copies are kept in the device's memory.
        calibration: ``ccvr`` re-trains the classifier after the last round on ``virtual_features`` a class,
            drawn from statistics of the devices' features (arXiv 2106.05001), ``equal`` for all classes or
            by their ``frequency`` (``virtual_balance``). ``covariance`` is what devices send, ``full``,
            ``diagonal`` or ``low_rank`` with ``covariance_rank``. ``calibration_epochs`` and
            ``calibration_lr`` are of the re-training.
        mode: ``rounds``, in which a model waits for its devices, or ``buffered`` (FedBuff, arXiv 2106.06639):
            ``participants`` devices are at work all the time, each from the model that was the newest when
            it was asked, and every ``buffer`` updates make the next model. An update that is τ models late
            counts for ⌊256/√(1 + τ)⌋ parts of 256, and is refused from ``max_staleness`` on.
        participants: devices a round: a count, or a fraction of those present (floor, at least 1).
        over_selection: how many more are asked than are waited for, 1.0 for none. It speeds rounds up and
            biases them towards fast devices.
        min_devices: devices that must be present before a round starts; 0 stands for ``participants``.
        min_participants: updates without which a round is repeated and not aggregated.
        join_timeout: seconds within which ``min_devices`` must come at the start.
        deadline: seconds for a round's training; the same for an evaluation.
        grace: seconds that a lost device, whom nobody can replace, has to come back.
        patience: seconds that a started run waits for devices before it stops (and can be resumed).
        epochs, batch_size, lr, weight_decay: local training.
        local_momentum: of the devices' SGD; the velocity is 0 at the start of every round, or kept on the
            device from round to round with ``keep_momentum``.
        proximal: μ of FedProx (arXiv 1812.06127), 0 for none.
        clip_norm: largest norm of a local gradient, 0 for no clipping. These three need a bundle that was
            exported with the option.
        schedule: of ``lr`` over the rounds: ``constant``, ``exponential`` (times ``decay`` a round) or
            ``cosine`` (to 0 after the last round).
        evaluation: on the ``server``'s data, on the ``devices``' held-out shares, or ``none``.
        aggregation: the ``mean`` of the updates, or, where some devices may lie, their ``median`` coordinate
            by coordinate or ``trimmed_mean``, without ``trim`` of them at either end. The last two hold a
            round's updates in memory.
        max_norm: largest L2 norm of an update's trainable part, 0 for no bound; one that is longer is
            refused, or clipped, as ``over_norm`` says.
        noise_multiplier: z, by which Gaussian noise of deviation z · ``max_norm`` is added to the sum of the
            clipped updates, 0 for none. Every update then counts once, and the divisor is the number that
            was wanted. ``delta`` is the δ for which a round's line states ε; take less than one over the
            number of devices.
        codec: how updates travel: ``fp32``, ``fp16``, or ``int8`` with a scale a channel, rounded at random,
            where each update makes up for what the one before it lost.
        compression: of updates, ``none`` or ``zstd``.
        max_examples: the largest sample count that one device may claim.
        bounds: by rule of aggregation, base-2 logarithm of the largest magnitude in an update.
        chunk_bytes: of tensors in one message; the default fits a limit of 128 KB. What a broker with MQTT 5
            says of its own limit wins where that is smaller.
        seed: of selection and of the devices' shuffles.
        keep_updates: keep all accepted updates, so that ``edge-sdk replay`` can recompute the models; or
            those of the last ``keep_rounds`` rounds, or of as many as have at most ``keep_bytes`` bytes of
            them together (the last round always), with the model and the state before each.
    """

    fleet: str
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)]
    strategy: Literal["fedavg", "fedprox", "fedavgm", "fedadam"] = "fedavg"
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    server_lr: Annotated[float, Meta(gt=0, le=100)] = 1.0
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Meta(gt=0, le=1)] = 1e-3
    selection: Literal["random", "grouped"] = "random"
    descriptor: Literal["hash", "feature"] = "hash"
    chain: Annotated[int, Meta(ge=0, le=1000)] = 0
    chain_passes: Annotated[int, Meta(ge=1, le=1000)] = 1
    augmentation: Annotated[float, Meta(ge=0, le=10)] = 0.0
    augmentation_stored: bool = True
    calibration: Literal["none", "ccvr"] = "none"
    covariance: Literal["full", "diagonal", "low_rank"] = "full"
    covariance_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    virtual_features: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    virtual_balance: Literal["equal", "frequency"] = "equal"
    calibration_epochs: Annotated[int, Meta(ge=1, le=10_000)] = 10
    calibration_lr: Annotated[float, Meta(gt=0, le=100)] = 0.05
    mode: Literal["rounds", "buffered"] = "rounds"
    buffer: Annotated[int, Meta(ge=1, le=MAX_COHORT)] = 5
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 20
    participants: Annotated[int, Meta(ge=1, le=MAX_COHORT)] | float = 10
    over_selection: Annotated[float, Meta(ge=1, le=10)] = 1.0
    min_devices: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    min_participants: Annotated[int, Meta(ge=1, le=100_000)] = 1
    join_timeout: Seconds = 60.0
    deadline: Seconds = 120.0
    grace: Annotated[float, Meta(ge=0, le=10_000_000)] = 10.0
    patience: Seconds = 3600.0
    epochs: Annotated[int, Meta(ge=1, le=10_000)] = 1
    batch_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 32
    lr: Rate = 0.05
    weight_decay: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    local_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    keep_momentum: bool = False
    proximal: Norm = 0.0
    clip_norm: Norm = 0.0
    schedule: Literal["constant", "exponential", "cosine"] = "constant"
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.99
    evaluation: Literal["server", "devices", "none"] = "server"
    aggregation: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.1
    max_norm: Norm = 0.0
    over_norm: Literal["refuse", "clip"] = "refuse"
    noise_multiplier: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    codec: Literal["fp32", "fp16", "int8"] = "fp32"
    compression: Literal["none", "zstd"] = "none"
    max_examples: Annotated[int, Meta(ge=1, le=1 << 32)] = 1 << 17
    bounds: dict[Literal["mean", "statistic", "counter"], Annotated[int, Meta(ge=-20, le=40)]] = {}
    chunk_bytes: Annotated[int, Meta(ge=1024, le=1 << 28)] = CHUNK_BYTES
    seed: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    keep_updates: bool = False
    keep_rounds: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    keep_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0

    def check(self) -> RunConfig:
        """Return the config if its settings are in their ranges and fit one another.

        Raises:
            ProtocolError: the fleet's name is not allowed.
            RunError: a setting out of its range, or a bound that could overflow the fixed-point sum.
        """
        try:
            # A config that was made in Python has not been validated yet.
            msgspec.convert(msgspec.to_builtins(self), RunConfig)
        except msgspec.ValidationError as error:
            raise RunError(_in_words(error)) from None
        check_id(self.fleet, "fleet")
        whole = isinstance(self.participants, int)
        if not whole and not 0 < self.participants <= 1:
            raise RunError(
                f"participants is {self.participants}: give a count to {MAX_COHORT} or a fraction in (0, 1]"
            )
        if self.forgets and not self.keep_updates:
            name = "keep_rounds" if self.keep_rounds else "keep_bytes"
            raise RunError(f"{name} bounds what keep_updates keeps: give both or neither")
        if self.keep_momentum and not self.local_momentum:
            raise RunError("keep_momentum has nothing to keep: give local_momentum")
        if self.strategy == "fedadam" and self.server_lr >= 1:
            raise RunError("fedadam moves each weight by about server_lr a round: give less than 1, say 0.01")
        if self.strategy == "fedprox" and not self.proximal:
            raise RunError("fedprox without a proximal term is fedavg: give proximal")
        if self.mode == "buffered":
            self._check_buffered()
        if self.noise_multiplier:
            self._check_noisy()
        if self.chain and self.over_selection > 1:
            raise RunError("over_selection asks more devices than a round waits for; a chain waits for all")
        if (self.covariance == "low_rank") != bool(self.covariance_rank):
            raise RunError("covariance_rank belongs to the covariance low_rank: give both or neither")
        if whole and self.min_participants > self.participants:
            raise RunError(
                f"min_participants is {self.min_participants}, but only {self.participants} take part"
            )
        self.precision(self.participants if isinstance(self.participants, int) else MAX_COHORT)
        return self

    def _check_buffered(self) -> None:
        alone = {
            "over_selection": self.over_selection > 1,
            "chain": self.chain > 0,
            "keep_momentum": self.keep_momentum,
            "evaluation by devices": self.evaluation == "devices",
            "a robust aggregation": self.aggregation != "mean",
        }
        if wrong := [name for name, is_set in alone.items() if is_set]:
            raise RunError(f"the buffered mode does not go with {wrong[0]}: leave one of them away")
        if self.min_participants > self.buffer:
            raise RunError(
                f"min_participants is {self.min_participants}, but a buffer of {self.buffer} is full before"
            )

    def _check_noisy(self) -> None:
        if not self.max_norm or self.over_norm != "clip":
            raise RunError("noise hides only what is clipped: give max_norm, and clip for over_norm")
        alone = {
            "the buffered mode": self.mode == "buffered",
            "chain": self.chain > 0,
            "a robust aggregation": self.aggregation != "mean",
            f"the codec {self.codec}": self.codec != "fp32",
            # What devices say of their data would shape the models past the noise.
            "grouped selection": self.selection == "grouped",
            "augmentation": self.augmentation > 0,
            "calibration": self.calibration != "none",
        }
        if wrong := [name for name, is_set in alone.items() if is_set]:
            raise RunError(f"noise does not go with {wrong[0]}: leave one of them away")

    def cohort_size(self, present: int) -> int:
        """How many updates a round waits for when ``present`` devices are there.

        >>> RunConfig(fleet="f", rounds=1, participants=0.1).cohort_size(25)
        2
        """
        if isinstance(self.participants, int):
            return min(self.participants, present)
        return min(max(math.floor(self.participants * present), 1), MAX_COHORT)

    def needed(self) -> int:
        """How many devices must be present before a round starts."""
        if self.min_devices:
            return self.min_devices
        return self.participants if isinstance(self.participants, int) else self.min_participants

    @property
    def forgets(self) -> bool:
        """Whether the updates of early rounds are not kept for good."""
        return self.keep_rounds > 0 or self.keep_bytes > 0

    def facts(self) -> tuple[Fact, ...]:
        """What the run needs to know of every device's data."""
        facts: list[Fact] = ["histogram"] if self.chain or self.augmentation else []
        if self.selection == "grouped":
            facts.append("descriptor" if self.descriptor == "hash" else "feature")
        return tuple(facts)

    def optimiser_of(self, round_number: int) -> Optimiser:
        """The devices' optimiser in round ``round_number``, from 1."""
        return Optimiser(
            lr=self.lr_of(round_number),
            weight_decay=self.weight_decay,
            momentum=self.local_momentum,
            proximal=self.proximal,
            clip_norm=self.clip_norm,
        )

    def lr_of(self, round_number: int) -> float:
        """Local learning rate of round ``round_number``, from 1."""
        done = round_number - 1
        if self.schedule == "exponential":
            return float(self.lr * self.decay**done)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * done / self.rounds)) / 2
        return self.lr

    def precision(self, cohort: int) -> Precision:
        """The fixed-point plan of a round with ``cohort`` updates; RunError if it would overflow."""
        bounds = {"mean": 6, "statistic": 16, "counter": 40} | {str(r): b for r, b in self.bounds.items()}
        noise = self.noise_multiplier * self.max_norm
        return plan_precision(bounds, largest_total=self.max_examples * cohort * self.unit, noise=noise)

    @property
    def unit(self) -> int:
        """Parts into which the weight of an update is divided."""
        return STALENESS_UNIT if self.mode == "buffered" else 1

    def make_sum(
        self, manifest: Manifest, precision: Precision, *, wanted: int = 0, noise_seed: bytes | None = None
    ) -> WeightedSum | RobustMean | NoisySum:
        """What a round's updates are added to.

        Args:
            wanted: how many of them a round with noise waits for.
            noise_seed: what that noise is drawn from.
        """
        if noise_seed is not None:
            noise = Noise(self.noise_multiplier, self.max_norm, noise_seed)
            return NoisySum(manifest.specs, manifest.rules, precision, noise=noise, wanted=wanted)
        if self.aggregation == "mean":
            return WeightedSum(manifest.specs, manifest.rules, precision, unit=self.unit)
        return RobustMean(manifest.rules, self.aggregation, trim=self.trim)

    def make_strategy(self) -> Strategy:
        """The strategy that ``strategy`` names."""
        if self.strategy == "fedavgm":
            return fedavgm(momentum=self.momentum, learning_rate=self.server_lr, nesterov=self.nesterov)
        if self.strategy == "fedadam":
            return fedadam(learning_rate=self.server_lr, beta1=self.momentum, beta2=self.beta2, tau=self.tau)
        return fedprox() if self.strategy == "fedprox" else fedavg()


def make_config(values: dict[str, Any]) -> RunConfig:
    """Check ``values`` and make a config of them.

    Raises:
        RunError: an unknown setting, a wrong type, a value out of its range.
    """
    try:
        return msgspec.convert(values, RunConfig).check()
    except msgspec.ValidationError as error:
        raise RunError(_in_words(error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; RunError if it is not one."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read as TOML: {error}") from None


def _in_words(error: msgspec.ValidationError) -> str:
    """A validation error with the setting's name in front."""
    text, _, where = str(error).partition(" - at `$.")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        option = missing[1].replace("_", "-")
        return f"no {missing[1]} is given: use --{option}, or {missing[1]} in the --config file"
    if unknown := re.fullmatch(r"Object contains unknown field `(\w+)`", text):
        return f"there is no setting {unknown[1]!r}"
    name = where.rstrip("`").split(".")[0].split("[")[0]
    return f"{name or 'the settings'}: {text[:1].lower()}{text[1:].replace('`', '')}"
