"""Views of tensors that are turned: axes are merged and split where they lie, if they lie side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge_export.layouts.values import Turned, Value, number, settled, turned


def view(value: Value, shape: Sequence[int]) -> Value:
    """Merge or split axes without moving anything, where what is merged lies side by side in memory."""
    if not isinstance(value, Turned):
        return settled(value).reshape(shape)
    groups = _groups(value.shape, shape)
    pieces: list[tuple[int, list[int]]] = []  # where it begins in memory, and its extents afterwards
    for old, new in groups:
        axes = [value.axes[axis] for axis in old if value.shape[axis] != 1]
        if axes and axes != list(range(axes[0], axes[0] + len(axes))):
            return settled(value).reshape(shape)
        pieces.append((axes[0] if axes else -1, new))
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
    base = value.base.reshape([extent for i in order for extent in pieces[i][1]])
    starts, position = {}, 0
    for i in order:
        starts[i] = position
        position += len(pieces[i][1])
    return turned(base, [starts[i] + k for i, (_, new) in enumerate(pieces) for k in range(len(new))])


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest parts of both shapes that hold as many elements: axes of the old, extents of the new."""
    # A batch of unknown size is like no other extent.
    before, after = ([number(extent, 1009) for extent in extents] for extents in (old, new))
    known = math.prod(extent for extent in after if extent != -1)
    new = [extent if extent != -1 else math.prod(old) // -math.prod(new) for extent in new]
    after = [extent if extent != -1 else math.prod(before) // known for extent in after]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        axes, extents, left, right = [], [], 1, 1
        while True:
            if i < len(old) and (left <= right or j == len(new)):
                axes.append(i)
                left *= before[i]
                i += 1
            elif j < len(new):
                extents.append(new[j])
                right *= after[j]
                j += 1
            if left == right and axes and extents:
                break
            if i == len(old) and j == len(new):
                break
        groups.append((axes, extents))
    return groups
