"""What the inner layers of local models see, for diagnostics: a bundle's programs show the last two only."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array, TensorSpec, check
from edge_server.diagnostics import cka_matrix

if TYPE_CHECKING:
    from torch import nn


def layer_cka(
    model: nn.Module, local: Sequence[Mapping[str, Array]], images: Array, *, layers: Sequence[str]
) -> dict[str, Array]:
    """Linear CKA between local models, layer by layer, in evaluation mode.

    Luo et al. (arXiv 2106.05001, section 3.1) find with it that the classifier differs most.

    Args:
        model: the PyTorch model that the bundle was exported from; it is not changed.
        local: weights and buffers of each local model, by the bundle's names.
        images: float32 ``[n, C, H, W]``, as :func:`edge_sdk.data.prepare` makes them, in one batch.
        layers: module paths in ``model``, ``conv1`` say; of one that runs more than once, the last output.

    Returns:
        By layer, float64 ``[models, models]``.

    Raises:
        DataError: no such layer, one that does not run or gives no tensor, or features that CKA refuses.
        TensorError: weights that are not the model's.
    """
    import torch

    network = copy.deepcopy(model).cpu().eval()
    modules = dict(network.named_modules())
    if unknown := [layer for layer in layers if layer not in modules]:
        raise DataError(f"the model has no layer {unknown[0]!r}: it has {', '.join(filter(None, modules))}")
    named = [*network.named_parameters(), *network.named_buffers()]
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named]
    features: dict[str, list[Array]] = {layer: [] for layer in layers}
    seen: dict[str, Array] = {}

    def see(layer: str, output: object) -> None:
        if not isinstance(output, torch.Tensor):
            raise DataError(f"layer {layer!r} gives no tensor: name one that does")
        # The next layer may work in place.
        seen[layer] = output.numpy().copy()

    for layer in layers:
        modules[layer].register_forward_hook(lambda _, __, output, layer=layer: see(layer, output))
    for weights in local:
        check(weights, specs)
        seen.clear()
        tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        with torch.no_grad():
            torch.func.functional_call(network, tensors, (torch.from_numpy(images),))
        for layer in layers:
            if layer not in seen:
                raise DataError(f"layer {layer!r} does not run: name one that does")
            features[layer].append(seen[layer])
    return {layer: cka_matrix(found) for layer, found in features.items()}
