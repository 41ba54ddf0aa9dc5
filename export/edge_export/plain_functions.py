"""Functions that PyTorch computes in kernels of its own, in others that any runtime has.

Convolutions over one axis become those over two for which :mod:`edge_export.decompositions` has gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.errors import ExportError
from edge_export.interpolation import interpolate
from edge_export.replacing import Replacing


def response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """``local_response_norm`` of [B, C, H, W]: the sums over neighbouring channels as a product by a band.

    Krizhevsky et al. (NeurIPS 2012), section 3.3, with alpha divided by ``size`` as PyTorch does.
    """
    channels = torch.arange(input.shape[1], device=input.device)
    offset = channels[None, :] - channels[:, None]
    band = ((offset >= -(size // 2)) & (offset <= (size - 1) // 2)).to(input.dtype)
    squares = (input * input).flatten(2)
    shares = (band @ squares).reshape(input.shape) * (alpha / size) + k
    # A power at every pixel is slow: by square roots where beta is the usual 0.75.
    root = torch.sqrt(shares)
    return input / (root * torch.sqrt(root) if beta == 0.75 else shares.pow(beta))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` of [..., F] as one product of matrices; PyTorch's own fixes the batch while it is traced."""
    if input.dim() <= 2:
        return functional.linear(input, weight, bias)
    rows = functional.linear(input.reshape(-1, weight.shape[1]), weight, bias)
    return rows.reshape(*input.shape[:-1], weight.shape[0])


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """``conv1d`` of [B, C, L]: over a map of one row."""
    around: Any = padding if isinstance(padding, str) else (0, _only(padding))
    strides, dilations = (1, _only(stride)), (1, _only(dilation))
    flat, kernel = input.unsqueeze(2), weight.unsqueeze(2)
    return functional.conv2d(flat, kernel, bias, strides, around, dilations, groups).squeeze(2)


def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """``conv_transpose1d`` of [B, C, L]: over a map of one row."""
    flat, kernel = input.unsqueeze(2), weight.unsqueeze(2)
    over = ((1, _only(stride)), (0, _only(padding)), (0, _only(output_padding)))
    return functional.conv_transpose2d(flat, kernel, bias, *over, groups, (1, _only(dilation))).squeeze(2)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``instance_norm`` by an image's own statistics: channels are the groups of a group normalisation."""
    if running_mean is not None or not use_input_stats:
        raise ExportError("instance_norm with running statistics is not covered")
    del running_var, momentum
    return functional.group_norm(input, input.shape[1], weight, bias, eps)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``pad``; what wraps around is put beside the map, where PyTorch writes into slices of a larger one."""
    if mode != "circular":
        return functional.pad(input, pad, mode, value)
    for axis, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        size = input.shape[-axis]
        parts = (input.narrow(-axis, size - before, before), input, input.narrow(-axis, 0, behind))
        input = torch.cat([part for part in parts if part.shape[-axis]], -axis)
    return input


def adaptive_average(input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
    """``adaptive_avg_pool2d``; the mean of a map whose channels are innermost gets strides from PyTorch."""
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return functional.adaptive_avg_pool2d(input, output_size)  # type: ignore[arg-type]


def _only(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.local_response_norm: response_norm,
    functional.linear: linear,
    functional.conv1d: convolution,
    functional.conv_transpose1d: transposed_convolution,
    functional.adaptive_avg_pool2d: adaptive_average,
    functional.instance_norm: instance_norm,
    functional.interpolate: interpolate,
    functional.pad: pad,
}


class PlainFunctions(Replacing):
    """Within this context the functions of ``REPLACED`` are computed as said here."""

    def replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What ``REPLACED`` has for ``function``, or itself."""
        return REPLACED.get(function, function)
