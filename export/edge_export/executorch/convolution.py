"""A 2-D convolution and its gradients as products of matrices and sums of taps.

ExecuTorch's own kernels are loops without blocking, and XNNPACK takes no weights that change; it multiplies
matrices well. Shapes throughout: ``x`` [B, C, H, W], ``weight`` [Co, C / groups, kh, kw], all known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from edge_export.errors import ExportError
from edge_export.executorch.taps import Window, batch_first, batch_last, permute, put_back, taps, windows

aten = torch.ops.aten


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """``aten.convolution``; ExportError if it is not over two axes."""
    _check(x)
    rows, columns = windows((weight.shape[2:], stride, padding, dilation))
    inside = batch_last(x)
    if transposed:
        size = tuple(
            (n - 1) * w.stride - 2 * w.padding + w.reach + more
            for n, w, more in zip(x.shape[2:], (rows, columns), output_padding, strict=True)
        )
        out = _spread(inside, weight, rows, columns, groups, (size[0], size[1]))
    else:
        out = _gather(inside, weight, rows, columns, groups)
    return batch_first(out if bias is None else out + bias.reshape(-1, 1, 1, 1))


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.convolution_backward``: gradients of input, weight and bias, those that the mask asks for."""
    del bias_sizes, output_padding
    _check(x)
    rows, columns = windows((weight.shape[2:], stride, padding, dilation))
    grad, inside = batch_last(grad_output), batch_last(x)
    by_x = by_weight = by_bias = None
    if output_mask[0]:
        if transposed:
            by_x = _gather(grad, weight, rows, columns, groups)
        else:
            by_x = _spread(grad, weight, rows, columns, groups, (x.shape[2], x.shape[3]))
        by_x = batch_first(by_x)
    if output_mask[1]:
        # The same with input and output in each other's places.
        seen, seeing = (grad, inside) if transposed else (inside, grad)
        by_weight = _weight_gradient(seen, seeing, weight, rows, columns, groups)
    if output_mask[2]:
        by_bias = grad_output.sum([0, 2, 3])
    return by_x, by_weight, by_bias


def _gather(x: Tensor, weight: Tensor, rows: Window, columns: Window, groups: int) -> Tensor:
    """[Co, Ho, Wo, B]: every output takes from its window."""
    channels, height, width, batch = x.shape
    seen = taps(x, rows, columns)
    out = (rows.out(height), columns.out(width), batch)
    if _is_depthwise(weight, groups):
        return _by_channel(seen, weight, channels)
    kernel = permute(weight, (0, 2, 3, 1)).reshape(weight.shape[0], -1)
    parts = [
        multiply(chosen, _columns(seen, group, groups)) for group, chosen in enumerate(_split(kernel, groups))
    ]
    return _joined(parts).reshape(weight.shape[0], *out)


def _spread(
    grad: Tensor, weight: Tensor, rows: Window, columns: Window, groups: int, size: tuple[int, int]
) -> Tensor:
    """[C, H, W, B]: every pixel takes from the windows that it is in; the transpose of :func:`_gather`."""
    count = rows.extent * columns.extent
    _, *out = grad.shape
    if _is_depthwise(weight, groups):
        parts = _by_channel_transposed(grad, weight, groups)
    else:
        kernel = permute(weight, (2, 3, 1, 0)).reshape(-1, weight.shape[0])
        wide = grad.reshape(weight.shape[0], -1)
        of_groups = [
            multiply(chosen, of_group)
            for chosen, of_group in zip(_split(kernel, groups, 1), _split(wide, groups), strict=True)
        ]
        each = weight.shape[1]
        parts = [
            _joined([of.narrow(0, tap * each, each) for of in of_groups]).reshape(groups * each, *out)
            for tap in range(count)
        ]
    return put_back(parts, rows, columns, size)


def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, rows: Window, columns: Window, groups: int
) -> Tensor:
    seen = taps(x, rows, columns)
    if _is_depthwise(weight, groups):
        return _by_channel_weight(seen, grad, weight)
    kh, kw = rows.extent, columns.extent
    of_groups = [
        # The small one of the two is turned: [pixels, Co].
        multiply(_columns(seen, group, groups), permute(part, (1, 0)))
        for group, part in enumerate(_split(grad.reshape(grad.shape[0], -1), groups))
    ]
    each = weight.shape[0] // groups
    return _joined([permute(of.reshape(kh, kw, weight.shape[1], each), (3, 2, 0, 1)) for of in of_groups])


def _columns(seen: list[Tensor], group: int, groups: int) -> Tensor:
    """The taps below one another: [kh · kw · C / groups, pixels]."""
    each = seen[0].shape[0] // groups
    return _joined([tap.narrow(0, group * each, each) if groups > 1 else tap for tap in seen]).reshape(
        len(seen) * each, -1
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` as the product of a batch of one, which is what XNNPACK has."""
    product: Tensor = aten.bmm.default(a.reshape(1, *a.shape), b.reshape(1, *b.shape))
    return product.reshape(a.shape[0], b.shape[1])


def _by_channel(seen: list[Tensor], weight: Tensor, channels: int) -> Tensor:
    """Depthwise: each tap times its weight by channel; with a multiplier, for each of its outputs."""
    times = weight.shape[0] // channels
    kernel = weight.reshape(channels, times, -1)
    parts = []
    for tap, part in enumerate(seen):
        factor = kernel[:, :, tap]
        if times == 1:
            parts.append(part * factor.reshape(channels, 1, 1, 1))
        else:
            wide = part.reshape(channels, 1, -1) * factor.reshape(channels, times, 1)
            parts.append(wide.reshape(weight.shape[0], *part.shape[1:]))
    return reduce(torch.add, parts)


def _by_channel_transposed(grad: Tensor, weight: Tensor, channels: int) -> list[Tensor]:
    times = weight.shape[0] // channels
    kernel = weight.reshape(channels, times, -1)
    parts = []
    for tap in range(kernel.shape[2]):
        factor = kernel[:, :, tap]
        if times == 1:
            parts.append(grad * factor.reshape(channels, 1, 1, 1))
        else:
            wide = grad.reshape(channels, times, -1) * factor.reshape(channels, times, 1)
            parts.append(wide.sum(1).reshape(channels, *grad.shape[1:]))
    return parts


def _by_channel_weight(seen: list[Tensor], grad: Tensor, weight: Tensor) -> Tensor:
    channels = seen[0].shape[0]
    wide = grad.reshape(channels, weight.shape[0] // channels, -1)
    products = [(wide * part.reshape(channels, 1, -1)).sum(2) for part in seen]
    return torch.stack(products, 2).reshape(weight.shape)


def _split(x: Tensor, groups: int, axis: int = 0) -> list[Tensor]:
    if groups == 1:
        return [x]
    each = x.shape[axis] // groups
    return [x.narrow(axis, group * each, each) for group in range(groups)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 0)


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _check(x: Tensor) -> None:
    if x.dim() != 4:
        raise ExportError(f"a convolution over {x.dim() - 2} axes is not covered: use nn.Conv2d")
