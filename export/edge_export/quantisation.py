"""Eight bits for a frozen network: one graph with the scales in it, which is then lowered for each runtime.

Static post-training quantisation by PyTorch's PT2E, annotated for XNNPACK: maps int8 with a scale and a zero
point each, weights int8 with a scale by output channel (Krishnamoorthi, arXiv 1806.08342).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from edge_export.errors import ExportError
from edge_export.tracer_errors import one_line_errors, quiet

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default)
_CLAMPS = (aten.hardtanh.default, aten.hardtanh_.default)


def quantised(network: fx.GraphModule, batches: Iterable[Tensor]) -> fx.GraphModule:
    """``network`` with its maps and weights rounded to eight bits.

    Args:
        network: what ``torch.export`` gives of a network in eval mode, BatchNorm folded; it is changed.
        batches: inputs from which the ranges of its maps are found.

    Raises:
        ExportError: torchao or ExecuTorch's quantiser is not installed, or the network is not one for them.
    """
    try:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        quantiser = _quantiser()
    except ImportError as error:
        raise ExportError(
            f"int8 needs torchao and ExecuTorch's quantiser at the export, for either runtime ({error}): "
            "pip install 'edge-sdk-fl[export,executorch]'"
        ) from None
    with quiet(), one_line_errors(), torch.no_grad():
        prepared = prepare_pt2e(network, quantiser)
        for batch in batches:
            prepared(batch)
        converted: fx.GraphModule = convert_pt2e(prepared)
        return converted


def _quantiser() -> Any:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        get_bias_qspec,
        get_input_act_qspec,
        get_output_act_qspec,
        get_weight_qspec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

    config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True)

    class Quantiser(xnnpack_quantizer.XNNPACKQuantizer):
        """XNNPACK's, that rounds after a ReLU6 and not before it as well, as it does for a ReLU."""

        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for clamp in model.graph.nodes:
                before = clamp.args[0] if clamp.target in _CLAMPS else None
                if (
                    not isinstance(before, fx.Node)
                    or before.target not in _CONVOLUTIONS
                    or len(before.users) > 1
                ):
                    continue
                specs = (get_input_act_qspec(config), get_weight_qspec(config), get_bias_qspec(config))
                operands = {
                    operand: spec
                    for operand, spec in zip(before.args, specs, strict=False)
                    if isinstance(operand, fx.Node)
                }
                before.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(operands, _annotated=True)
                clamp.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    output_qspec=get_output_act_qspec(config), _annotated=True
                )
            annotated: fx.GraphModule = super().annotate(model)
            return annotated

    return Quantiser().set_global(config)
