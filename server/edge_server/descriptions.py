"""What the devices have said of their data: label histograms and descriptors, and how they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.description import check_description, description_specs
from edge_sdk.protocol.messages import Augmentation, Fact, to_number
from edge_sdk.tensors import Array, Tensors
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.assignment import Assignment
from edge_server.cohort import Cohort
from edge_server.config import RunConfig
from edge_server.mediators import multiples
from edge_server.rows import AcceptedResult, RunRow, WorkKey
from edge_server.selection import device_seed
from edge_server.store import Store

PLANNED = 1
"""The round number under which devices describe their data as the plan of augmentation leaves it."""


@dataclass(slots=True, kw_only=True)
class Descriptions:
    """What is known of the devices of a run; the store has it too.

    Attributes:
        plan: by class, the multiple to which its examples are augmented; None while it is not made yet.
        histograms: by device, int64 [classes], after augmentation where there is any.
        descriptors: by device, its hash or its mean feature.
    """

    config: RunConfig
    bundle: Bundle
    plan: dict[int, float] | None
    histograms: dict[str, Array] = field(default_factory=dict)
    descriptors: dict[str, Array] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)
    _groups: dict[str, int] | None = None

    @classmethod
    def restore(cls, store: Store, run: RunRow, bundle: Bundle) -> Descriptions:
        """What the store has."""
        plan = run.multiples if run.config.augmentation else {}
        known = cls(config=run.config, bundle=bundle, plan=plan)
        for stage in (0, PLANNED) if plan else (0,):
            known._told.clear()
            for result in store.results(WorkKey(run.id, stage, 0, "describe")):
                known.add(result.device, known.check(store.blob(result.hash)))
        return known

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What is asked for."""
        return self.config.facts()

    def undescribed(self, present: Iterable[str]) -> list[str]:
        """Devices that have yet to be asked."""
        if not self.facts:
            return []
        return [device for device in present if device not in self._told and device not in self._silent]

    def check(self, data: bytes) -> Tensors:
        """The tensors of a description; TensorError if they are not what was asked for, or cannot be true."""
        return check_description(
            data, self.facts, self.bundle.manifest, max_examples=self.config.max_examples
        )

    def add(self, device: str, tensors: Mapping[str, Array]) -> None:
        """Note what a device has said."""
        self._told.add(device)
        if "histogram" in tensors:
            self.histograms[device] = tensors["histogram"]
        for name in ("descriptor", "feature"):
            if name in tensors:
                self.descriptors[device] = tensors[name]
                self._groups = None

    def conclude(self, asked: Iterable[str]) -> None:
        """Those of ``asked`` that have said nothing are asked no more until they come anew."""
        self._silent |= set(asked) - self._told

    def come_anew(self, device: str) -> None:
        """The device has joined: it may be asked once more."""
        self._silent.discard(device)

    def make_plan(self) -> dict[int, float]:
        """Fix by how much each class is augmented, from the histograms so far (section III-C, step 2).

        Where anything is, devices are asked once more: what counts is their data after it.
        """
        total = np.sum(list(self.histograms.values()), axis=0) if self.histograms else np.zeros(1, np.int64)
        self.plan = multiples(total, self.config.augmentation)
        if self.plan:
            self._told.clear()
        return self.plan

    def histograms_of(self, devices: Iterable[str]) -> dict[str, Array]:
        """The histograms of ``devices``; that of one that shares none is empty."""
        nothing = np.zeros(self.bundle.manifest.classes, np.int64)
        return {device: self.histograms.get(device, nothing) for device in devices}

    def groups(self) -> Mapping[str, int]:
        """By device, its group of like data; made anew when a descriptor comes. Empty without grouping."""
        if self.config.selection != "grouped" or not self.descriptors:
            return {}
        if self._groups is None:
            from edge_server.grouping import group

            wanted = self.config.cohort_size(len(self.descriptors))
            self._groups = group(self.descriptors, groups=wanted, seed=self.config.seed)
        return self._groups

    def augmentation(self, device: str) -> Augmentation | None:
        """What a device must know to augment its data; None where nothing is augmented."""
        if not self.plan:
            return None
        return Augmentation(
            multiples={str(label): to_number(multiple) for label, multiple in self.plan.items()},
            seed=device_seed(self.config.seed, 0, device),
            stored=self.config.augmentation_stored,
        )


@dataclass(slots=True, kw_only=True)
class Describing(Assignment):
    """Devices are asked to describe their data."""

    known: Descriptions
    asked: list[str]

    @classmethod
    def of(cls, run: RunRow, known: Descriptions, asked: list[str], *, now: float) -> Describing:
        """Ask all of ``asked`` at once."""
        cohort = Cohort(wanted=len(asked), asked=len(asked), order=asked)
        cohort.call()
        key = WorkKey(run.id, PLANNED if known.plan else 0, 0, "describe")
        return cls(
            key=key,
            cohort=cohort,
            config=run.config,
            bundle=known.bundle,
            began=now,
            known=known,
            asked=asked,
        )

    def details(self, device: str) -> Mapping[str, Any]:
        """What the run must know; labels are counted as training will see them."""
        return {"wants": self.known.facts, "augmentation": self.known.augmentation(device)}

    def largest(self) -> int:
        """Bytes that a description may have."""
        specs = description_specs(self.known.facts, self.bundle.manifest)
        return sum(spec.nbytes for spec in specs) + SAFETENSORS_OVERHEAD

    def check(self, device: str, data: bytes, examples: int) -> Mapping[str, Any]:  # noqa: ARG002
        """The tensors of a description; TensorError if they are not what was asked for, or cannot be true."""
        return self.known.check(data)

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Note it."""
        self.known.add(result.device, tensors)
