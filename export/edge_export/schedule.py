"""The order of nodes in a file, by which ONNX Runtime decides what it computes when.

It goes back from each output, the last one first, and of a node's inputs to that whose node stands last in
the file. In the order of a trace the mask of an activation, which the forward pass knows of, stands behind
the gradient that it is for: it would be computed first, and be out of the cache when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx


def by_depth(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """What many nodes lead to behind what few do, so that of two inputs the longer way is gone first.

    Nodes that no other reads stay as they are, behind all: the gradients of the last layers come first.
    """
    read = {name for node in nodes for name in node.input}
    depths: dict[str, int] = {}
    inner, ends = [], []
    for node in nodes:
        depth = 1 + max((depths.get(name, 0) for name in node.input), default=0)
        depths |= dict.fromkeys(node.output, depth)
        if read.isdisjoint(node.output):
            ends.append(node)
        else:
            inner.append((depth, node))
    return [node for _, node in sorted(inner, key=lambda pair: pair[0])] + ends
