"""Depthwise convolution of larger maps: the rows that a window sees, side by side, times one matrix.

Along a row a convolution is a Toeplitz matrix for each row of the kernel; in the matrix of a channel those of
the rows that a window sees lie one above the other. A copy of the rows and products of matrices take less
time than ONNX Runtime's depthwise convolutions on narrow maps and with a stride, and for the weight's
gradient always. Channels are outermost meanwhile: [C, B, H, W].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.decompositions.geometry import Geometry, meets

MOST_COLUMNS = 64
"""Of a map, with a stride: the arithmetic for each pixel grows with them."""

COLUMNS_BY_TAP = 6.5
"""Of a map for each tap of a kernel's row, at stride 1, where ONNX Runtime's own is faster beyond."""


def pays(geometry: Geometry) -> bool:
    """Whether ONNX Runtime's own convolution takes longer, whose time grows with the taps."""
    columns = geometry.size[1]
    if geometry.rows.stride == geometry.columns.stride == 1:
        return columns < COLUMNS_BY_TAP * geometry.columns.extent
    return columns <= MOST_COLUMNS


class Sight(NamedTuple):
    """What each position sees, ``seen[position]``, rows of a map; and what it makes of them.

    Its row r is made of row e of those seen by ``taps[e][r]``, a row of the kernel, or none if that is its
    extent.
    """

    seen: list[list[int]]
    taps: list[list[int]]


class Rowwise(NamedTuple):
    """Kernels [C, 1, kh, kw]: see :class:`edge_export.decompositions.convolution.Form`."""

    geometry: Geometry

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each row of the output at a time."""
        sight = self._of_outputs()
        made = _side_by_side(x, sight.seen) @ _matrices(weight, sight.taps, self._pattern(x))
        return made.reshape(weight.shape[0], -1, *self.geometry.out).transpose(0, 1)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """As many rows of the map at once as the stride is."""
        height, width = self.geometry.size
        sight, pattern = self._of_inputs(), self._pattern(weight).transpose(1, 2)
        made = _side_by_side(grad_output, sight.seen) @ _matrices(weight, sight.taps, pattern)
        count = len(sight.seen) * self.geometry.rows.stride
        result = made.reshape(weight.shape[0], -1, count, width)
        return (result if count == height else result[:, :, :height]).transpose(0, 1)

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Sums along the diagonals of one product a channel, of what the input's gradient sees too.

        What the forward pass sees would do as well, and be kept until now in as many copies.
        """
        channels, _, kernel, _ = weight.shape
        (height, width), (_, out) = self.geometry.size, self.geometry.out
        sight, at_once = self._of_inputs(), self.geometry.rows.stride
        lines = x.transpose(0, 1)
        if spare := len(sight.seen) * at_once - height:
            lines = functional.pad(lines, (0, 0, 0, spare))
        pixels, seen = lines.reshape(channels, -1, at_once * width), _side_by_side(grad_output, sight.seen)
        # The smaller of the two is turned.
        if pixels.shape[2] <= seen.shape[2]:
            by_matrix = pixels.transpose(1, 2) @ seen
        else:
            by_matrix = (seen.transpose(1, 2) @ pixels).transpose(1, 2)
        blocks = by_matrix.reshape(channels * at_once, width, -1, out).transpose(1, 2)
        by_row = blocks.reshape(-1, width * out) @ self._pattern(x).flatten(1).t()
        met = [made[row] for row in range(at_once) for made in sight.taps]
        of_taps = torch.tensor([met.index(tap) for tap in range(kernel)], device=x.device)
        return by_row.reshape(channels, len(met), -1)[:, of_taps].reshape(weight.shape)

    def _of_outputs(self) -> Sight:
        """For each row of the output those of the map that its window sees."""
        by_tap = self.geometry.rows.seen(self.geometry.size[0])
        return Sight(
            [list(rows) for rows in zip(*by_tap, strict=True)], [[tap] for tap in range(len(by_tap))]
        )

    def _of_inputs(self) -> Sight:
        """For each ``stride`` rows of the map those of the output that they have a part in."""
        kernel, stride, padding, dilation, _ = self.geometry.rows
        # Row r of position q meets the output's row q + shift by the tap that takes both to one pixel.
        met = {
            ((r + padding - tap * dilation) // stride, r): tap
            for r in range(stride)
            for tap in range(kernel)
            if (r + padding - tap * dilation) % stride == 0
        }
        shifts = range(min(shift for shift, _ in met), max(shift for shift, _ in met) + 1)
        seen = [[q + shift for shift in shifts] for q in range(-(-self.geometry.size[0] // stride))]
        return Sight(seen, [[met.get((shift, r), kernel) for r in range(stride)] for shift in shifts])

    def _pattern(self, like: Tensor) -> Tensor:
        return meets(self.geometry.columns, self.geometry.size[1], like)


def _side_by_side(x: Tensor, seen: list[list[int]]) -> Tensor:
    """[C, B · positions, rows seen · W]; a row outside the map is 0."""
    channels, height, width = (int(size) for size in x.shape[1:])
    index = [row if 0 <= row < height else height for position in seen for row in position]
    lines = x.transpose(0, 1)
    if height in index:
        lines = functional.pad(lines, (0, 0, 0, 1))
    gathered = lines[:, :, torch.tensor(index, device=x.device)]
    return gathered.reshape(channels, -1, len(seen[0]) * width)


def _matrices(weight: Tensor, taps: list[list[int]], pattern: Tensor) -> Tensor:
    """[C, rows seen · W, rows made · W'] for ``pattern`` [kw, W, W']."""
    channels, _, kernel, width = weight.shape
    by_row = (weight.reshape(-1, width) @ pattern.flatten(1)).reshape(channels, kernel, -1)
    chosen = [tap for made in taps for tap in made]
    if kernel in chosen:
        by_row = functional.pad(by_row, (0, 0, 0, 1))
    if chosen != list(range(by_row.shape[1])):
        by_row = by_row[:, torch.tensor(chosen, device=weight.device)]
    blocks = by_row.reshape(channels, len(taps), len(taps[0]), *pattern.shape[1:])
    return blocks.transpose(2, 3).reshape(channels, len(taps) * pattern.shape[1], -1)
