"""A network in eval mode as a graph, its BatchNorms folded into the convolutions before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn.utils.fusion import fuse_conv_bn_weights

from edge_export.errors import ExportError
from edge_export.programs import BATCH
from edge_export.tracer_errors import one_line_errors, quiet

aten = torch.ops.aten
_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}


def frozen(network: nn.Module, input_shape: tuple[int, ...]) -> fx.GraphModule:
    """``network`` as a graph for batches of any size, each BatchNorm after a convolution folded into that.

    Args:
        network: in eval mode, from one tensor to one; not changed.
        input_shape: of one example.

    Raises:
        ExportError: it cannot be traced, fixes the size of the batch, or normalises over it.
    """
    with quiet(), one_line_errors(), torch.no_grad():
        batch = {0: Dim("batch", min=2)}
        exported = export(network, (torch.zeros(BATCH, *input_shape),), dynamic_shapes=(batch,), strict=False)
        graph = exported.module(check_guards=False)
    for norm in graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if norm.args[5]:
            raise ExportError("a frozen BatchNorm without running statistics would look across the batch")
        _fold(graph, norm)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fold(network: fx.GraphModule, norm: fx.Node) -> None:
    convolution: Any = norm.args[0]
    if convolution.target not in _CONVOLUTIONS or len(convolution.users) > 1:
        return
    x, weight, bias, *rest = (*convolution.args, None)[: max(len(convolution.args), 3)]
    scale, shift, mean, variance, _, _, epsilon = norm.args[1:8]
    named: list[Any] = [weight, bias, mean, variance, scale, shift]
    if any(node is not None and node.op != "get_attr" for node in named):
        return
    w, b, m, v, k, t = (_constant(network, node) for node in named)
    folded = fuse_conv_bn_weights(w, b, m, v, epsilon, k, t)  # type: ignore[arg-type]
    made = []
    # The quantiser asks a node's metadata for its dtype.
    for part, tensor, like in zip(("weight", "bias"), folded, (weight, mean), strict=True):
        network.register_buffer(name := f"{norm.name}_{part}", tensor.detach().float())
        with network.graph.inserting_before(convolution):
            made.append(network.graph.get_attr(name))
        made[-1].meta = dict(like.meta)
    convolution.args = (x, *made, *rest)
    norm.replace_all_uses_with(convolution)
    network.graph.erase_node(norm)


def _constant(network: fx.GraphModule, node: fx.Node | None) -> Tensor | None:
    """The tensor that a node stands for, in float64."""
    if node is None:
        return None
    found: Any = network
    for name in str(node.target).split("."):
        found = getattr(found, name)
    double: Tensor = found.detach().double()
    return double
