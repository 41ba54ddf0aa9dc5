"""How a kernel moves along the axes of a map, and which pixels it meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """How a kernel moves along one axis; with ``ceil`` the last window may reach beyond the padding."""

    extent: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Pixels from the first to the last of a window."""
        return self.dilation * (self.extent - 1) + 1

    def out(self, size: int) -> int:
        """Windows along an axis of ``size``."""
        room = size + 2 * self.padding - self.reach
        count = (room + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        # None begins in the padding behind.
        return count - 1 if self.ceil and (count - 1) * self.stride >= size + self.padding else count

    def behind(self, size: int) -> int:
        """Pixels behind an axis of ``size`` that the last window sees."""
        return max((self.out(size) - 1) * self.stride + self.reach - size - self.padding, 0)

    def seen(self, size: int) -> list[list[int]]:
        """For each tap the pixel that each output meets, ``size`` where that lies outside."""
        return [
            [
                pixel
                if 0 <= (pixel := out * self.stride + tap * self.dilation - self.padding) < size
                else size
                for out in range(self.out(size))
            ]
            for tap in range(self.extent)
        ]

    def seeing(self, size: int) -> list[list[int]]:
        """For each tap the output that each pixel is met by, the number of outputs where there is none."""
        none = self.out(size)
        met: list[list[int]] = []
        for pixels in self.seen(size):
            by = {pixel: out for out, pixel in enumerate(pixels)}
            met.append([by.get(pixel, none) for pixel in range(size)])
        return met

    def flipped(self) -> Window:
        """The window by which, at stride 1, a gradient looks back at what has made it."""
        return self._replace(padding=self.reach - 1 - self.padding)

    def tiles(self, size: int) -> bool:
        """Whether every pixel is in exactly one window."""
        return (
            self.padding == 0
            and self.dilation == 1
            and self.extent == self.stride
            and size % self.extent == 0
        )


def windows(moves: Sequence[Sequence[int]], *, ceil: bool = False) -> tuple[Window, Window]:
    """Along rows and columns, of extents, strides, paddings and dilations: two of each, or one for both."""
    rows, columns = ([int(values[axis % len(values)]) for values in moves] for axis in (0, 1))
    return Window._make([*rows, ceil]), Window._make([*columns, ceil])
