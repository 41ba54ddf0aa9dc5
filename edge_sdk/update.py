"""An update: what a device received minus what training made of it (Hsu et al., arXiv 1909.06335)."""

from __future__ import annotations

from collections.abc import Mapping

from edge_sdk.errors import TensorError
from edge_sdk.manifest import Rule
from edge_sdk.tensors import Array, Tensors, check_finite


def difference(received: Mapping[str, Array], trained: Mapping[str, Array]) -> Tensors:
    """Δ = received − trained by name, in the tensors' own dtypes: a pseudo-gradient.

    >>> import numpy as np
    >>> difference({"w": np.float32([3.0])}, {"w": np.float32([1.0])})["w"].tolist()
    [2.0]
    """
    return {name: received[name] - trained[name] for name in received}


def check_update(update: Mapping[str, Array], rules: Mapping[str, Rule], bounds: Mapping[str, int]) -> None:
    """Check that every value may enter the fixed-point sum.

    Args:
        update: tensors that have the model's names, shapes and dtypes.
        rules: rule of aggregation by tensor name.
        bounds: by rule, the base-2 logarithm of the largest magnitude that is accepted.

    Raises:
        TensorError: a value is not finite, or beyond its bound; names the tensor.
    """
    check_finite(update)
    for name, tensor in update.items():
        bound = 2.0 ** bounds[rules[name]]
        if tensor.size and max(abs(float(tensor.max())), abs(float(tensor.min()))) > bound:
            raise TensorError(f"the update of {name!r} exceeds the bound {bound:g}: lower the learning rate")
