"""A depthwise convolution as one product of matrices for each channel.

Down the columns of a map a convolution is a Toeplitz matrix that the kernel's taps fill; along its rows the
taps lie side by side. That is more arithmetic than a sum of taps, and far less traffic: each of those would
be a pass over the memory. Maps are [C, H, W, B], ``weight`` [C · m, 1, kh, kw], m outputs for each channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_export.executorch.taps import gathered, multiply, permute
from edge_export.windows import Window

aten = torch.ops.aten


def gather(x: Tensor, weight: Tensor, rows: Window, columns: Window) -> Tensor:
    """The convolution, [C · m, Ho, Wo, B]."""
    channels, height, width, batch = x.shape
    used, beside = _used(columns.seen(width), width)
    matrix = permute(_matrices(weight, channels, rows, height, used), (0, 1, 3, 4, 2))
    product = multiply(matrix.reshape(channels, -1, height * len(used)), _side_by_side(x, beside))
    return product.reshape(weight.shape[0], rows.out(height), columns.out(width), batch)


def spread(
    grad: Tensor, weight: Tensor, rows: Window, columns: Window, channels: int, size: tuple[int, int]
) -> Tensor:
    """Its gradient by the map, [C, H, W, B]; ``size`` is H and W."""
    height, width = size
    used, beside = _used(columns.seeing(width), columns.out(width))
    matrix = permute(_matrices(weight, channels, rows, height, used), (0, 4, 1, 3, 2))
    product = multiply(
        matrix.reshape(channels, height, -1),
        _side_by_side(grad.reshape(channels, -1, *grad.shape[2:]), beside),
    )
    return product.reshape(channels, height, width, grad.shape[3])


def weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, rows: Window, columns: Window) -> Tensor:
    """Its gradient by the weight."""
    channels, height, width, batch = x.shape
    (used, beside), (out_height, out_width) = _used(columns.seen(width), width), grad.shape[1:3]
    seen = _side_by_side(x, beside)
    turned = permute(grad.reshape(channels, -1, out_width * batch), (0, 2, 1))
    by_matrix = multiply(seen, turned).reshape(channels, height, len(used), -1, out_height)
    entries = permute(by_matrix, (0, 3, 2, 4, 1)).reshape(-1, out_height * height)
    by_taps: Tensor = aten.mm.default(entries, _pattern(rows, height).mT)
    by_taps = permute(by_taps.reshape(weight.shape[0], len(used), rows.extent), (0, 2, 1))
    unused = [used.start, columns.extent - used.stop]
    if any(unused):
        by_taps = aten.constant_pad_nd.default(by_taps, unused, 0.0)
    return by_taps.reshape(weight.shape)


def _matrices(weight: Tensor, channels: int, rows: Window, height: int, used: range) -> Tensor:
    """[C, m, taps of a row, Ho, H]: what output row o takes from row h for each of the taps used."""
    taps = permute(weight.reshape(weight.shape[0], *weight.shape[2:]), (0, 2, 1))
    if len(used) < taps.shape[1]:
        taps = taps.narrow(1, used.start, len(used))
    entries: Tensor = aten.mm.default(taps.reshape(-1, rows.extent), _pattern(rows, height))
    return entries.reshape(channels, -1, len(used), rows.out(height), height)


def _pattern(rows: Window, height: int) -> Tensor:
    """[kh, Ho · H]: 1 where output row o meets row h by a tap."""
    met = [[float(row == h) for row in tap for h in range(height)] for tap in rows.seen(height)]
    return torch.tensor(met)


def _side_by_side(x: Tensor, index: list[list[int]]) -> Tensor:
    """[C, rows · taps, out · B]: what the taps of a row see, row by row."""
    return gathered(x, 2, index).reshape(x.shape[0], x.shape[1] * len(index), -1)


def _used(index: list[list[int]], outside: int) -> tuple[range, list[list[int]]]:
    """The taps that see anything, and what they see; on a map of one pixel it is the middle one."""
    seeing = [tap for tap, pixels in enumerate(index) if any(pixel != outside for pixel in pixels)]
    used = range(seeing[0], seeing[-1] + 1)
    return used, index[used.start : used.stop]
