"""A round behind mediators: weights pass along chains of devices (Astraea, arXiv 1907.01132)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.protocol.messages import Ref, Task
from edge_sdk.tensors import Array, Tensors, encode
from edge_sdk.update import check_update
from edge_server.aggregation import MeanUpdate
from edge_server.chain import Chain
from edge_server.evaluation import Evaluation
from edge_server.mediators import divergence
from edge_server.publication import Publication
from edge_server.relay import Relay
from edge_server.rounds import RoundResult, TrainingRound, round_row
from edge_server.rows import AcceptedResult, RoundRow, RunRow


@dataclass(slots=True, kw_only=True)
class ChainedRound(TrainingRound):
    """An attempt while it is open: each device trains from what the one before it in its chain has made.

    Every hop's weights are the server's: they are served to the one device that is next, and are kept
    until it has delivered. The mean is over mediators, each weighted by the examples behind it.
    """

    cohort: Relay
    publication: Publication
    histograms: Mapping[str, Array]
    hops: int = 0
    lent: dict[tuple[str, ...], Ref] = field(default_factory=dict)

    @classmethod
    def over(
        cls,
        run: RunRow,
        bundle: Bundle,
        chains: list[list[str]],
        *,
        weights: Tensors,
        publication: Publication,
        histograms: Mapping[str, Array],
        attempt: int,
        now: float,
    ) -> ChainedRound:
        """Begin an attempt at the round after the run's last over ``chains``."""
        selected = [device for chain in chains for device in chain]
        precision = run.config.precision(len(selected))
        row = round_row(
            run, selected, wanted=len(selected), attempt=attempt, precision=precision, chains=chains
        )
        return cls.restored(
            run, bundle, row, weights=weights, publication=publication, histograms=histograms, now=now
        )

    @classmethod
    def restored(
        cls,
        run: RunRow,
        bundle: Bundle,
        row: RoundRow,
        *,
        weights: Tensors,
        publication: Publication,
        histograms: Mapping[str, Array],
        now: float,
    ) -> ChainedRound:
        """The attempt as the store has it, without its accepted hops: those are added again, in order."""
        precision = run.config.precision(row.wanted)
        return cls(
            key=row,
            row=row,
            cohort=Relay([Chain(c, weights, passes=run.config.chain_passes) for c in row.chains]),
            config=run.config,
            bundle=bundle,
            began=now,
            precision=precision,
            total=run.config.make_sum(bundle.manifest, precision),
            publication=publication,
            histograms=histograms,
        )

    @property
    def turns(self) -> int:
        """Turns of the longest chain."""
        return max(len(chain.devices) for chain in self.cohort.chains) * self.config.chain_passes

    def hop_of(self, device: str) -> int:
        """Which turn of its chain is on."""
        return self._chain(device).hop if self.cohort.chain_of(device) is not None else 0

    def task(self, device: str, nonce: str, *, bundle: Ref, model: Ref, left: float) -> Task:
        """Train from the chain's weights, which the server gives to who asks for them."""
        chain = self._chain(device)
        if chain.delivered:
            lent = self.lent.get(chain.devices) or self.publication.lend(encode(chain.weights))
            model = self.lent[chain.devices] = lent
        return TrainingRound.task(self, device, nonce, bundle=bundle, model=model, left=left)

    def check(self, device: str, data: bytes, examples: int) -> Mapping[str, Any]:
        """As for any update; and what the whole chain has made stays within the bounds of one."""
        tensors = TrainingRound.check(self, device, data, examples)
        chain = self._chain(device)
        check_update(chain.update(chain.after(tensors)), self.bundle.manifest.rules, self.precision.bounds)
        return tensors

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Pass the weights on."""
        chain = self._chain(result.device)
        if lent := self.lent.pop(chain.devices, None):
            self.publication.take_back(lent)
        while chain.hop < result.hop:  # a turn that was skipped before the server started anew
            chain.skip()
        chain.forward(tensors, result.examples)

    def count(self, result: AcceptedResult) -> None:
        """Note that a hop is in."""
        TrainingRound.count(self, result)
        self._chain(result.device).credit(result.device, result.examples)
        # Its next turn is another piece of work, whose update may be the same.
        self.hashes.pop(result.device, None)
        self.hops += 1

    def close(self) -> None:
        """Nobody's turn is to come: take back what was lent."""
        for lent in self.lent.values():
            self.publication.take_back(lent)
        self.lent.clear()

    def mean(self) -> MeanUpdate:
        """Σ n_m Δ_m / Σ n_m over the mediators."""
        for chain in self.cohort.chains:
            if chain.examples:
                self.total.add(chain.update(), chain.examples)
        return self.total.mean()

    def result(self, evaluation: Evaluation | None, *, model_bytes: int, seconds: float) -> RoundResult:
        """The round's line."""
        line = TrainingRound.result(self, evaluation, model_bytes=model_bytes, seconds=seconds)
        joint = [
            divergence(np.sum([self.histograms[d] for d in chain.devices if d in self.histograms], axis=0))
            for chain in self.cohort.chains
            if any(d in self.histograms for d in chain.devices)
        ]
        return replace(
            line,
            examples=sum(chain.examples for chain in self.cohort.chains),
            bytes_down=self.hops * model_bytes,
            chains=len(self.cohort.chains),
            divergence=float(np.mean(joint)) if joint else None,
        )

    def _chain(self, device: str) -> Chain:
        chain = self.cohort.chain_of(device)
        assert chain is not None
        return chain
