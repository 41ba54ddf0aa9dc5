"""One round of a simulation: the devices of a cohort train one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_sdk.errors import RunError, TensorError
from edge_sdk.tensors import Array, Tensors, encode
from edge_sdk.update import check_update
from edge_server.aggregation import MeanUpdate, NoisySum, Precision, RobustMean, WeightedSum
from edge_server.chain import Chain
from edge_server.cohort import Cohort
from edge_server.evaluation import Evaluation
from edge_server.mediators import chains, divergence
from edge_server.privacy import Spent, simulated_seed
from edge_server.rounds import RoundResult
from edge_server.selection import select
from edge_simulation.devices import Devices


class DivergedError(RunError):
    """Training did not stay finite on as many devices as a round needs."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the server knows of the devices' data: groups and label histograms by device, where it asked."""

    groups: Mapping[str, int]
    histograms: Mapping[str, Array]


@dataclass(slots=True)
class SimulatedRound:
    """Trains from ``weights``, side by side or in chains, and keeps the round's figures."""

    fleet: Devices
    told: Told
    number: int
    weights: Tensors
    spent: Spent
    participants: int = 0
    hops: int = 0
    sent_before: int = field(init=False)
    chains: list[Chain] = field(default_factory=list)
    total: WeightedSum | RobustMean | NoisySum = field(init=False)
    precision: Precision = field(init=False)

    def mean(self) -> MeanUpdate:
        """Select, train, and take the mean."""
        config, manifest = self.fleet.config, self.fleet.bundle.manifest
        cohort = select(
            self.fleet.ids,
            wanted=config.cohort_size(len(self.fleet.ids)),
            over_selection=config.over_selection,
            groups=self.told.groups,
            seed=config.seed,
            round_number=self.number,
            attempt=0,
        )
        self.precision = config.precision(cohort.wanted)
        noise_seed = simulated_seed(config.seed, self.number) if config.noise_multiplier else None
        self.total = config.make_sum(manifest, self.precision, wanted=cohort.wanted, noise_seed=noise_seed)
        if config.chain:
            self._train_in_chains(cohort.call())
        else:
            self._train_apart(cohort)
        if self.participants < config.min_participants:
            raise DivergedError(
                f"round {self.number}: training stayed finite on {self.participants} devices, of at least "
                f"{config.min_participants}: lower the learning rate"
            )
        self.spent.add(cohort.accepted)
        return self.total.mean()

    def __post_init__(self) -> None:
        self.sent_before = self.fleet.bytes_sent

    def result(self, evaluation: Evaluation | None, seconds: float) -> RoundResult:
        """The round's line."""
        size = len(encode(self.weights))
        joint = [
            divergence(np.sum([self.told.histograms[device] for device in chain.devices], axis=0))
            for chain in self.chains
        ]
        return RoundResult(
            round=self.number,
            attempt=0,
            accuracy=evaluation.accuracy if evaluation else None,
            loss=evaluation.loss if evaluation else None,
            participants=self.participants,
            examples=self.total.examples,
            bytes_up=self.fleet.bytes_sent - self.sent_before,
            bytes_down=self.hops * size,
            seconds=seconds,
            chains=len(self.chains),
            divergence=float(np.mean(joint)) if joint else None,
            epsilon=self.spent.epsilon,
        )

    def _train_apart(self, cohort: Cohort) -> None:
        while not cohort.complete and (called := cohort.call()):
            for device in called:
                if cohort.complete:
                    break
                try:
                    self.total.add(*self._train(device, self.weights))
                    cohort.accept(device)
                except TensorError:
                    cohort.drop(device)
        self.participants = len(cohort.accepted)

    def _train_in_chains(self, devices: list[str]) -> None:
        config = self.fleet.config
        rules = self.fleet.bundle.manifest.rules
        histograms = {device: self.told.histograms[device] for device in devices}
        for ids in chains(histograms, longest=config.chain):
            chain = Chain(ids, self.weights, passes=config.chain_passes)
            while (device := chain.device) is not None:
                try:
                    update, examples = self._train(device, chain.weights, hop=chain.hop)
                    # What a whole chain has made stays within the bounds of one update too.
                    check_update(chain.update(chain.after(update)), rules, self.precision.bounds)
                    chain.forward(update, examples)
                except TensorError:
                    chain.skip()
            if chain.examples:
                self.total.add(chain.update(), chain.examples)
            self.chains.append(chain)
            self.participants += len(chain.delivered)

    def _train(self, device: str, weights: Tensors, *, hop: int = 0) -> tuple[Tensors, int]:
        trained = self.fleet.train(
            device, weights, round_number=self.number, hop=hop, bounds=self.precision.bounds
        )
        self.hops += 1
        return trained
