"""How each aten operator is said in ONNX, by kind.

``TRANSLATIONS`` holds, for an aten operator, a function of the :class:`Translator` and of the operator's
arguments (tensors as graph nodes or constants) that emits ONNX operators and gives the name of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from edge_export.onnx_operators import elementwise, pooling, products, quantised, reductions, shapes

TRANSLATIONS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    **elementwise.TABLE,
    **reductions.TABLE,
    **shapes.TABLE,
    **products.TABLE,
    **pooling.TABLE,
    **quantised.TABLE,  # what products says too, of eight bits as well
}
