"""A bound on the length of one device's update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from edge_sdk.errors import TensorError
from edge_sdk.manifest import Rule
from edge_sdk.tensors import Array, Tensors

OverNorm: TypeAlias = Literal["refuse", "clip"]


def bound_norm(
    update: Mapping[str, Array], rules: Mapping[str, Rule], *, largest: float, over: OverNorm
) -> Tensors:
    """Hold the L2 norm of an update's trainable part to ``largest``; 0 is no bound.

    Statistics and counters are neither counted nor changed.

    Raises:
        TensorError: the norm is over the bound, and ``over`` says ``refuse``.
    """
    if not largest:
        return dict(update)
    trainable = [name for name, rule in rules.items() if rule == "mean"]
    norm = math.sqrt(math.fsum(float(np.square(update[n].astype(np.float64)).sum()) for n in trainable))
    if norm <= largest:
        return dict(update)
    if over == "refuse":
        raise TensorError(f"the update's norm {norm:.4g} is over the run's bound of {largest:g}")
    clipped = {n: np.asarray((update[n] * (largest / norm)).astype(update[n].dtype)) for n in trainable}
    return {**update, **clipped}
