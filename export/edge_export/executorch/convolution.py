"""A 2-D convolution and its gradients as products of matrices.

ExecuTorch's own kernels are loops without blocking, and XNNPACK takes no weights that change; it multiplies
matrices well. Shapes throughout: ``x`` [B, C, H, W], ``weight`` [Co, C / groups, kh, kw], all known.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from edge_export.errors import ExportError
from edge_export.executorch import depthwise
from edge_export.executorch.taps import (
    batch_first,
    batch_last,
    gathered,
    gathered_maps,
    multiply,
    permute,
    put_back,
)
from edge_export.windows import Window, windows


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
    if _is_depthwise(weight, groups):
        return depthwise.gather(x, weight, rows, columns)
    _, height, width, batch = x.shape
    out, size = weight.shape[0], (rows.out(height), columns.out(width), batch)
    kernel = weight.reshape(groups, out // groups, -1, columns.extent)
    if not _by_rows(weight, columns):
        seen = _seen(x, rows, columns).reshape(groups, -1, size[0] * size[1] * batch)
        return multiply(kernel.reshape(groups, out // groups, -1), seen).reshape(out, *size)
    # The rows of a window by one product for each of its columns, which are summed afterwards.
    seen = gathered(x, 1, rows.seen(height)).reshape(groups, -1, size[0] * width * batch)
    wide = permute(kernel, (0, 3, 1, 2)).reshape(groups, -1, kernel.shape[2])
    parts = multiply(wide, seen).reshape(groups, columns.extent, out // groups, size[0], width, batch)
    taps = [parts.select(1, tap).reshape(out, size[0], width, batch) for tap in range(columns.extent)]
    return put_back(taps[::-1], Window(1), columns.flipped(), size[:2])


def _spread(
    grad: Tensor, weight: Tensor, rows: Window, columns: Window, groups: int, size: tuple[int, int]
) -> Tensor:
    """[C, H, W, B]: every pixel takes from the windows that it is in; the transpose of :func:`_gather`."""
    if _is_depthwise(weight, groups):
        return depthwise.spread(grad, weight, rows, columns, groups, size)
    if rows.stride == columns.stride == 1:
        return _gather(grad, _flipped(weight, groups), rows.flipped(), columns.flipped(), groups)
    out, each, *_ = weight.shape
    count = rows.extent * columns.extent
    kernel = permute(weight.reshape(groups, out // groups, each, count), (0, 3, 2, 1))
    products = multiply(
        kernel.reshape(groups, count * each, -1), grad.reshape(groups, out // groups, -1)
    ).reshape(groups, count, each, *grad.shape[1:])
    parts = [products.select(1, tap).reshape(groups * each, *grad.shape[1:]) for tap in range(count)]
    return put_back(parts, rows, columns, size)


def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, rows: Window, columns: Window, groups: int
) -> Tensor:
    if _is_depthwise(weight, groups):
        return depthwise.weight_gradient(x, grad, weight, rows, columns)
    pixels = grad[0].numel()
    seen, grad = _seen(x, rows, columns).reshape(groups, -1, pixels), grad.reshape(groups, -1, pixels)
    # The smaller of the two is turned.
    if grad.shape[1] > seen.shape[1]:
        return multiply(grad, permute(seen, (0, 2, 1))).reshape(weight.shape)
    return permute(multiply(seen, permute(grad, (0, 2, 1))), (0, 2, 1)).reshape(weight.shape)


def _seen(x: Tensor, rows: Window, columns: Window) -> Tensor:
    """Every window as a column: [C, kh · kw, Ho · Wo, B]."""
    if rows == columns == Window(1):
        return x
    return gathered_maps(x, rows.seen(x.shape[1]), columns.seen(x.shape[2]))


def _by_rows(weight: Tensor, columns: Window) -> bool:
    """Whether kw products of rows move less memory than one product of whole windows."""
    out, each, height, width = weight.shape
    return columns.stride == 1 and width > 1 and each * height * (width - 1) * 5 > out * width * 8


def _flipped(weight: Tensor, groups: int) -> Tensor:
    """[C, Co / groups, kh, kw]: turned by half a turn, with input and output in each other's places."""
    out, each, *kernel = weight.shape
    taps = weight.reshape(groups, out // groups, each, -1)
    if taps.shape[3] > 1:
        taps = gathered(taps, 3, [list(range(taps.shape[3]))[::-1]])
    return permute(taps, (0, 2, 1, 3)).reshape(groups * each, out // groups, *kernel)


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _check(x: Tensor) -> None:
    if x.dim() != 4:
        raise ExportError(f"a convolution over {x.dim() - 2} axes is not covered: use nn.Conv2d")
