"""How a kernel moves over a map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """Along rows or along columns: the kernel's extent, the map's and the output's, and how it moves."""

    kernel: int
    size: int
    out: int
    stride: int
    padding: int
    dilation: int

    def meets(self, like: Tensor) -> Tensor:
        """For each tap, which pixel meets which output: [kernel, size, out] of 0 and 1."""
        taps, pixels, outputs = (torch.arange(count, device=like.device) for count in self[:3])
        met = outputs * self.stride - self.padding + taps.view(-1, 1, 1) * self.dilation
        return (pixels.view(1, -1, 1) == met).to(like.dtype)


class Geometry(NamedTuple):
    """Both axes, and the groups of channels that have nothing to do with each other."""

    rows: Axis
    columns: Axis
    groups: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Geometry:
        """That of ``x`` [B, C, H, W] and ``weight`` [Co, C / groups, kh, kw]; one number stands for two."""
        axes = []
        for axis in (0, 1):
            size, kernel = int(x.shape[2 + axis]), int(weight.shape[2 + axis])
            s, p, d = (int(values[axis % len(values)]) for values in (stride, padding, dilation))
            axes.append(Axis(kernel, size, (size + 2 * p - d * (kernel - 1) - 1) // s + 1, s, p, d))
        return cls(axes[0], axes[1], groups)

    def by_axis(self, change: Callable[[Axis], Axis]) -> Geometry:
        """With both axes changed."""
        return Geometry(change(self.rows), change(self.columns), self.groups)

    @property
    def is_pointwise(self) -> bool:
        """A 1x1 kernel at stride 1 without padding: every pixel is by itself."""
        return self.groups == 1 and all(
            (axis.kernel, axis.stride, axis.padding) == (1, 1, 0) for axis in (self.rows, self.columns)
        )

    @property
    def size(self) -> tuple[int, int]:
        """Of the map."""
        return self.rows.size, self.columns.size

    @property
    def out(self) -> tuple[int, int]:
        """Extent of the output's maps."""
        return self.rows.out, self.columns.out
