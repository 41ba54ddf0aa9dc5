"""Rounds that wait for nobody in particular: so many updates make a model (FedBuff, arXiv 2106.06639)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.protocol.messages import Key, Ref, Task
from edge_server.aggregation import WeightedSum
from edge_server.cohort import Cohort
from edge_server.config import STALENESS_UNIT, RunConfig
from edge_server.rounds import TrainingRound, round_row
from edge_server.rows import AcceptedResult, RoundRow, RunRow


def share_of(staleness: int) -> int:
    """⌊256/√(1 + τ)⌋: what an update counts for that is ``staleness`` models late, in parts of 256.

    A whole number, so that the sum is exact; FedBuff's own choice is the same root.

    >>> [share_of(staleness) for staleness in (0, 1, 3, 99)]
    [256, 181, 128, 25]
    """
    return max(math.isqrt(STALENESS_UNIT**2 // (1 + staleness)), 1)


@dataclass(slots=True, kw_only=True)
class BufferedRound(TrainingRound):
    """The buffer that becomes the model after the run's last.

    Devices go on over the rounds: ``began_at`` says by device from the model of which round it works, and
    ``models`` has those models as long as anyone may ask for them. Those of the rounds in ``gone`` ended with
    an earlier server: who has begun with one has it.
    """

    began_at: dict[str, int] = field(default_factory=dict)
    models: dict[int, Ref] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    delivered: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def after(
        cls,
        run: RunRow,
        bundle: Bundle,
        order: list[str],
        *,
        model: Ref,
        earlier: BufferedRound | None,
        now: float,
    ) -> BufferedRound:
        """Open the next buffer; devices at work in ``earlier`` go on.

        Args:
            order: the devices that are there, in the order in which they are asked.
            model: the newest model.
        """
        wanted = run.config.buffer
        asked = _at_once(run.config, present=len(order))
        cohort = Cohort(wanted=wanted, asked=asked, order=order, refilled=True)
        if earlier is not None:
            assert isinstance(earlier.cohort, Cohort)
            cohort.carry_over(earlier.cohort)
        precision = run.config.precision(wanted)
        # Who is at work is known after a restart too: what they bring then counts.
        row = round_row(run, cohort.selected, wanted=wanted, attempt=0, precision=precision)
        opened = cls.of(run, bundle, row, cohort, now=now)
        opened.models[row.round] = model
        if earlier is not None:
            opened.augment = earlier.augment
            opened.delivered = earlier.delivered
            opened.gone = earlier.gone
            oldest, pending, lost = row.round - run.config.max_staleness, cohort.pending, cohort.lost
            for device, number in earlier.began_at.items():
                # Who comes back does so to what still counts.
                if device in pending or (device in lost and number >= oldest):
                    opened.began_at[device] = number
            needed = set(opened.began_at.values())
            opened.models |= {number: ref for number, ref in earlier.models.items() if number in needed}
        return opened

    @classmethod
    def restore(cls, run: RunRow, bundle: Bundle, row: RoundRow, *, now: float) -> BufferedRound:
        """The buffer as the store has it, without its accepted updates: those are added again."""
        asked = _at_once(run.config, present=len(row.selected))
        cohort = Cohort.restored(wanted=row.wanted, asked=asked, selected=row.selected, refilled=True)
        return cls.of(run, bundle, row, cohort, now=now)

    @property
    def rolling(self) -> bool:
        """Each device has a deadline of its own."""
        return True

    def is_keyed(self, device: str, key: Key) -> bool:
        """Whether a message is about this run's training, from a model that is not too old."""
        mine = (self.row.run, "train", 0) == (key.run, key.kind, key.attempt)
        staleness = self.row.round - key.round
        fresh = 0 <= staleness <= self.config.max_staleness
        return mine and fresh and (device, key.round) not in self.delivered

    def task(self, device: str, nonce: str, *, bundle: Ref, model: Ref, left: float) -> Task:
        """Train from the newest model; who is at work goes on with its own."""
        self.models.setdefault(self.row.round, model)
        number = self.began_at.setdefault(device, self.row.round)
        if number not in self.models:
            number = self.began_at[device] = self.row.round
        return TrainingRound.task(self, device, nonce, bundle=bundle, model=self.models[number], left=left)

    def lacks(self, device: str, blob: str) -> bool:
        """Whether a device wants a model that no server has any more; its task is then the newest."""
        number = self.began_at.get(device)
        if number is None or number not in self.gone or self.models[number].hash != blob:
            return False
        self.began_at[device] = self.row.round
        return True

    def reconsider(self, present: list[str]) -> None:
        """Those who have declined may be asked again, to train from the newest model."""
        assert isinstance(self.cohort, Cohort)
        for device in self.cohort.reconsider(present):
            self.began_at.pop(device, None)

    def round_of(self, device: str) -> int:
        """The round from whose model the device works."""
        return self.began_at.get(device, self.row.round)

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Add an update, the less the older the model is that it began with."""
        assert isinstance(self.total, WeightedSum)
        share = share_of(self.row.round - result.round)
        self.total.add(tensors, result.examples, share=share)

    def count(self, result: AcceptedResult) -> None:
        """Note that an update is in; its device may be asked again in the next round."""
        TrainingRound.count(self, result)
        self.delivered.add((result.device, result.round))
        self.began_at.pop(result.device, None)
        self.hashes.pop(result.device, None)


def _at_once(config: RunConfig, *, present: int) -> int:
    """Devices at work at a time. A number holds although not so many are there yet: they may come."""
    return config.participants if isinstance(config.participants, int) else config.cohort_size(present)
