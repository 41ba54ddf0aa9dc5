"""A convolution's windows, tap by tap, on maps whose batch is the innermost axis.

A tap is where one weight of the kernel looks: a map as large as the output. With the batch innermost a row
of a tap is one piece of memory of ``width × batch`` numbers, which ExecuTorch's portable kernels copy at the
speed of memory; with the batch outermost it is ``width`` numbers.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from edge_export.windows import Window

aten = torch.ops.aten

LAST = (1, 2, 3, 0)
"""From [B, C, H, W] to [C, H, W, B]."""
FIRST = (3, 0, 1, 2)
"""Back again."""


def batch_last(x: Tensor) -> Tensor:
    """[C, H, W, B] of [B, C, H, W]."""
    return permute(x, LAST)


def batch_first(x: Tensor) -> Tensor:
    """[B, C, H, W] of [C, H, W, B]."""
    return permute(x, FIRST)


def permute(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The tensor with its axes in another order, as the operator that XNNPACK takes."""
    result: Tensor = aten.permute_copy.default(x, list(axes))
    return result


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for each of a batch, which is the product that XNNPACK has."""
    product: Tensor = aten.bmm.default(a, b)
    return product


def taps(x: Tensor, rows: Window, columns: Window, filler: float = 0.0) -> list[Tensor]:
    """For each tap, from the first row on, the [C, Ho, Wo, B] that it sees of [C, H, W, B].

    Args:
        filler: what lies around the map.
    """
    out = rows.out(x.shape[1]), columns.out(x.shape[2])
    around = [columns.padding, columns.behind(x.shape[2]), rows.padding, rows.behind(x.shape[1])]
    if any(around):
        x = aten.constant_pad_nd.default(x, [0, 0, *around], filler)
    return [
        _seen(_seen(x, 1, i, rows, out[0]), 2, j, columns, out[1])
        for i in range(rows.extent)
        for j in range(columns.extent)
    ]


def _seen(x: Tensor, axis: int, tap: int, window: Window, out: int) -> Tensor:
    start = tap * window.dilation
    stop = start + (out - 1) * window.stride + 1
    if (start, stop, window.stride) == (0, x.shape[axis], 1):
        return x
    result: Tensor = aten.slice.Tensor(x, axis, start, stop, window.stride)
    return result


def gathered(x: Tensor, axis: int, index: list[list[int]]) -> Tensor:
    """``x`` at ``index`` [taps][out] along ``axis``, which becomes [taps · out]; zeros lie beyond its end."""
    flat = [pixel for tap in index for pixel in tap]
    if x.shape[axis] in flat:
        x = _with_zeros(x, axis)
    result: Tensor = aten.index_select.default(x, axis, torch.tensor(flat))
    return result


def gathered_maps(x: Tensor, rows: list[list[int]], columns: list[list[int]]) -> Tensor:
    """[C, taps, out, B] of [C, H, W, B]: the same along two axes at once, as one copy."""
    channels, height, width, batch = x.shape
    if any(height in tap for tap in rows):
        x = _with_zeros(x, 1)
    if any(width in tap for tap in columns):
        x = _with_zeros(x, 2)
    wide = int(x.shape[2])
    first = torch.tensor([[[[row * wide] for row in tap]] for tap in rows])
    second = torch.tensor([[[tap] for tap in columns]])
    index = first + second
    seen: Tensor = aten.index_select.default(x.reshape(channels, -1, batch), 1, index.reshape(-1))
    return seen.reshape(channels, len(rows) * len(columns), -1, batch)


def _with_zeros(x: Tensor, axis: int) -> Tensor:
    around = [0, 0] * (x.dim() - axis - 1) + [0, 1]
    result: Tensor = aten.constant_pad_nd.default(x, around, 0.0)
    return result


def put_back(parts: list[Tensor], rows: Window, columns: Window, size: tuple[int, int]) -> Tensor:
    """Sum of what every tap has for the pixels that it sees: the transpose of :func:`taps`.

    Args:
        parts: [C, Ho, Wo, B] for each tap.
        size: height and width of the result [C, H, W, B].
    """
    height, width = size
    lines = [parts[start : start + columns.extent] for start in range(0, len(parts), columns.extent)]
    return _woven([_woven(line, 2, columns, width) for line in lines], 1, rows, height)


def _woven(parts: list[Tensor], axis: int, window: Window, size: int) -> Tensor:
    if window.tiles(size):
        side_by_side = torch.stack(parts, axis + 1) if len(parts) > 1 else parts[0]
        return side_by_side.reshape(*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :])
    placed = [_placed(part, axis, tap, window, size) for tap, part in enumerate(parts)]
    return reduce(torch.add, placed)


def _placed(part: Tensor, axis: int, tap: int, window: Window, size: int) -> Tensor:
    """``part`` where the tap has seen it, among zeros, without the padding."""
    part = _spread(part, axis, window.stride)
    start = tap * window.dilation - window.padding
    before, after = max(-start, 0), max(start + part.shape[axis] - size, 0)
    if before or after:
        part = part.narrow(axis, before, part.shape[axis] - before - after)
    start = max(start, 0)
    around = [start, size - start - part.shape[axis]]
    if not any(around):
        return part
    axes_after = [0, 0] * (part.dim() - axis - 1)
    result: Tensor = aten.constant_pad_nd.default(part, [*axes_after, *around], 0.0)
    return result


def _spread(part: Tensor, axis: int, stride: int) -> Tensor:
    """Zeros between the entries of an axis, as many as the stride has left out."""
    if stride == 1:
        return part
    shape = list(part.shape)
    apart = part.reshape(*shape[: axis + 1], 1, *shape[axis + 1 :])
    axes_after = [0, 0] * (len(shape) - axis - 1)
    apart = aten.constant_pad_nd.default(apart, [*axes_after, 0, stride - 1], 0.0)
    spread: Tensor = apart.reshape(*shape[:axis], shape[axis] * stride, *shape[axis + 1 :])
    return spread
