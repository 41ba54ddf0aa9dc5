"""How a kernel moves over a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edge_export.windows import Window, windows


class Geometry(NamedTuple):
    """Along both axes, on maps of ``size``, in groups of channels that know nothing of each other."""

    rows: Window
    columns: Window
    size: tuple[int, int]
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
        rows, columns = windows((weight.shape[2:], stride, padding, dilation))
        return cls(rows, columns, (int(x.shape[2]), int(x.shape[3])), groups)

    @property
    def out(self) -> tuple[int, int]:
        """Extent of the output's maps."""
        return self.rows.out(self.size[0]), self.columns.out(self.size[1])

    @property
    def axes(self) -> tuple[tuple[Window, int, int], tuple[Window, int, int]]:
        """For rows and columns the window, the map's extent and the output's."""
        return (self.rows, self.size[0], self.out[0]), (self.columns, self.size[1], self.out[1])

    @property
    def is_pointwise(self) -> bool:
        """A 1x1 kernel at stride 1 without padding: every pixel is by itself."""
        return self.groups == 1 and all(window[:3] == (1, 1, 0) for window in (self.rows, self.columns))


def meets(window: Window, size: int, like: Tensor) -> Tensor:
    """For each tap, which pixel meets which output: [taps, size, out] of 0 and 1."""
    taps, pixels, outputs = (
        torch.arange(count, device=like.device) for count in (window.extent, size, window.out(size))
    )
    met = outputs * window.stride - window.padding + taps.view(-1, 1, 1) * window.dilation
    return (pixels.view(1, -1, 1) == met).to(like.dtype)
