"""Charts as SVG text: small, sharp, readable by a screen reader, and coloured by the page around them.

Colours are CSS variables with a default, so a chart follows a page's dark mode and stands on its own too.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from edge_sdk.tensors import Array

INK = "var(--ink, #1c2430)"
MUTED = "var(--muted, #667085)"
RULE = "var(--rule, #e3e7ee)"
SERIES = ("var(--series-1, #8a94a6)", "var(--series-2, #0f62c9)", "var(--series-3, #c2571a)")
_FONT = 'font-family="system-ui, -apple-system, \'Segoe UI\', Roboto, sans-serif" font-size="12"'
_CLASSES = (
    "#4c78a8", "#f2a14a", "#d9606a", "#79b8b2", "#5f9e5a",
    "#e7c55a", "#a87fa6", "#f4a3ad", "#9a7863", "#a9b0bb",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One curve: points (x, y) ascending in x; those that are not finite are left out."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """One mark of a scatter plot, with its name."""

    label: str
    x: float
    y: float


def class_colour(index: int) -> str:
    """The colour of a class, ``#rrggbb``: ten chosen ones, then hues a golden angle apart."""
    if index < len(_CLASSES):
        return _CLASSES[index]
    rgb = colorsys.hls_to_rgb(index * 0.381966 % 1, 0.6, 0.45)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def line_chart(
    lines: Sequence[Line], *, title: str, x_label: str, y_label: str, percent: bool = False
) -> str:
    """Curves over one axis, at most three, each labelled at its end.

    Args:
        lines: the curves.
        title: read out and shown on hovering; the page gives the visible heading.
        x_label: what x counts, under the axis.
        y_label: what y is, above the axis.
        percent: y is a fraction, written as a percentage on an axis within 0 to 100.
    """
    width, height, left, right, top, bottom = 560, 300, 46, 78, 30, 40
    curves = [
        (line.label, [p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])])
        for line in lines
    ]
    points = [point for _, curve in curves for point in curve]
    x_ticks = _ticks([x for x, _ in points], 6)
    if all(float(x).is_integer() for x, _ in points):
        x_ticks = [tick for tick in x_ticks if float(tick).is_integer()]
    y_ticks = _ticks([y for _, y in points], 5)
    if percent:
        y_ticks = [tick for tick in y_ticks if -1e-9 <= tick <= 1 + 1e-9]
    x0, x1 = min([x for x, _ in points], default=0.0), max([x for x, _ in points], default=1.0)
    y0 = min([y for _, y in points] + y_ticks)
    y1 = max([y for _, y in points] + y_ticks)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (y - y0) / (y1 - y0) if y1 > y0 else 0.5
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [f'<text x="0" y="14" fill="{MUTED}">{escape(y_label)}</text>']
    for tick in y_ticks:
        y = at(x0, tick)[1]
        label = f"{tick:.0%}" if percent and _whole(y_ticks, 100) else _number(tick * (100 if percent else 1))
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="{RULE}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{label}</text>')
    for tick in (tick for tick in x_ticks if x0 <= tick <= x1):
        x = at(tick, y0)[0]
        parts.append(
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="{MUTED}">'
            f"{_number(tick)}</text>"
        )
    middle = (left + width - right) / 2
    parts.append(
        f'<text x="{middle}" y="{height - 4}" text-anchor="middle" fill="{MUTED}">{escape(x_label)}</text>'
    )
    ends = _apart([at(*curve[-1])[1] if curve else math.nan for _, curve in curves], 15)
    for number, (label, curve) in enumerate(curves):
        if not curve:
            continue
        colour = SERIES[number % len(SERIES)]
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in curve)
        x, y = at(*curve[-1])
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.25" stroke-linejoin="round" '
            f'stroke-linecap="round"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
            f'<text x="{x + 9:.1f}" y="{ends[number] + 4:.1f}" fill="{colour}" font-weight="600">'
            f"{escape(label)}</text>"
        )
    described = "; ".join(
        f"{label} ends at {curve[-1][1]:.1%}" if percent else f"{label} ends at {_number(curve[-1][1])}"
        for label, curve in curves
        if curve
    )
    return _svg(width, height, title, f"{y_label} against {x_label}. {described}.", parts)


def stacked_bars(
    histogram: Array,
    class_names: Sequence[str],
    *,
    title: str,
    device_names: Sequence[str] = (),
) -> str:
    """One column a device, made of its examples by class; its full height is the largest device.

    Args:
        histogram: int ``[devices, classes]``.
        class_names: one a class.
        title: read out and shown on hovering.
        device_names: one a device; numbers from 1 by default.
    """
    devices, classes = histogram.shape
    names = list(device_names) or [str(number + 1) for number in range(devices)]
    width, left, top, plot = 1120, 46, 12, 240
    per_row = max(1, min(classes, 10))
    spread = min(130.0, (width - left) / per_row)
    height = top + plot + 48 + 22 * math.ceil(classes / per_row)
    largest = max(1, int(histogram.sum(axis=1).max(initial=0)))
    step = (width - left) / max(1, devices)
    gap = min(6.0, step * 0.18)
    parts = []
    for tick in _ticks([0, largest], 4):
        if 0 <= tick <= largest:
            y = top + plot * (1 - tick / largest)
            parts.append(f'<path d="M{left} {y:.1f}H{width}" stroke="{RULE}"/>')
            parts.append(
                f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">'
                f"{_number(tick)}</text>"
            )
    for device in range(devices):
        y, bars = float(top + plot), []
        counts = histogram[device].tolist()
        for index in (index for index in range(classes) if counts[index]):
            tall = plot * counts[index] / largest
            y -= tall
            bars.append(
                f'<rect x="{left + device * step + gap / 2:.2f}" y="{y:.2f}" width="{step - gap:.2f}" '
                f'height="{tall:.2f}" fill="{class_colour(index)}"/>'
            )
        held = (
            ", ".join(f"{class_names[i]}: {counts[i]}" for i in range(classes) if counts[i]) or "no examples"
        )
        parts.append(
            f'<g class="device"><title>{escape(f"{names[device]} ({held})")}</title>{"".join(bars)}</g>'
        )
    every = math.ceil(devices / 25)
    for device in range(0, devices, every):
        x = left + (device + 0.5) * step
        parts.append(
            f'<text x="{x:.1f}" y="{top + plot + 16}" text-anchor="middle" fill="{MUTED}">{device + 1}</text>'
        )
    for index in range(classes):
        x, y = left + index % per_row * spread, top + plot + 36 + 22 * (index // per_row)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="11" height="11" rx="2" fill="{class_colour(index)}"/>'
            f'<text x="{x + 17:.1f}" y="{y + 10}" fill="{INK}">{escape(_short(class_names[index]))}</text>'
        )
    described = f"{devices} devices, {classes} classes, {int(histogram.sum())} examples."
    return _svg(width, height, title, described, parts)


def heatmap(
    values: Array,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
    top: float | None = None,
) -> str:
    """A matrix as squares, the darker the larger, with the figures in them where there is room.

    Args:
        values: ``[rows, columns]``, at least 0; what is not finite is left blank.
        row_names: one a row, from the top.
        column_names: one a column.
        title: read out and shown on hovering; the page gives the visible heading.
        x_label: what columns are, under them.
        y_label: what rows are, above them.
        top: the value of the darkest square; the largest there is by default.
    """
    rows, columns = values.shape
    left, above, width = 110, 24, 560
    side = min(44.0, (width - left) / max(1, columns))
    bottom = above + side * rows
    finite = [float(value) for value in values.flat if math.isfinite(value)]
    largest = max(finite, default=0.0) if top is None else top
    parts = [f'<text x="0" y="14" fill="{MUTED}">{escape(y_label)}</text>']
    for row in range(rows):
        y = above + side * row
        for column in range(columns):
            x, value = left + side * column, float(values[row, column])
            known = math.isfinite(value)
            depth = min(max(value / largest, 0.0), 1.0) if known and largest > 0 else 0.0
            figure = _short_number(value) if known else "not measured"
            says = f"{row_names[row]}, {column_names[column]}: {figure}"
            parts.append(
                f'<g class="cell"><title>{escape(says)}</title><rect x="{x:.2f}" y="{y:.2f}" '
                f'width="{side:.2f}" height="{side:.2f}" stroke="{RULE}" fill="{SERIES[1]}" '
                f'fill-opacity="{depth:.3f}"/>'
            )
            if known and side >= 30:
                parts.append(
                    f'<text x="{x + side / 2:.1f}" y="{y + side / 2 + 4:.1f}" text-anchor="middle" '
                    f'fill="{"#ffffff" if depth > 0.55 else INK}">{figure}</text>'
                )
            parts.append("</g>")
    every = math.ceil(14 / side)
    for row in range(0, rows, every):
        parts.append(
            f'<text x="{left - 8}" y="{above + side * (row + 0.5) + 4:.1f}" text-anchor="end" '
            f'fill="{MUTED}">{escape(_short(row_names[row]))}</text>'
        )
    for column in range(columns if side >= 14 else 0):
        x = left + side * (column + 0.5)
        parts.append(
            f'<text transform="translate({x + 4:.1f} {bottom + 8:.1f}) rotate(-90)" text-anchor="end" '
            f'fill="{MUTED}">{escape(_short(column_names[column]))}</text>'
        )
    longest = max((len(_short(name)) for name in column_names), default=0) if side >= 14 else 0
    height = math.ceil(bottom) + 7 * longest + 32
    parts.append(f'<text x="{left}" y="{height - 6}" fill="{MUTED}">{escape(x_label)}</text>')
    spread = f" from {_short_number(min(finite))} to {_short_number(max(finite))}" if finite else ""
    described = f"{y_label} by {x_label}: {rows} by {columns} values{spread}."
    return _svg(width, height, title, described, parts)


def scatter(points: Sequence[Point], *, title: str, x_label: str, y_label: str) -> str:
    """Marks over two axes, each with its name on hovering, and beside it where they are few.

    Args:
        points: the marks; those that are not finite are left out.
        title: read out and shown on hovering; the page gives the visible heading.
        x_label: what x is, under the axis.
        y_label: what y is, above the axis.
    """
    width, height, left, right, top, bottom = 560, 300, 58, 78, 30, 40
    shown = [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]
    x_ticks, y_ticks = _ticks([point.x for point in shown], 6), _ticks([point.y for point in shown], 5)

    def across(x: float) -> float:
        return left + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (width - left - right)

    def down(y: float) -> float:
        return height - bottom - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (height - top - bottom)

    parts = [f'<text x="0" y="14" fill="{MUTED}">{escape(y_label)}</text>']
    for tick in y_ticks:
        parts.append(
            f'<path d="M{left} {down(tick):.1f}H{width - right}" stroke="{RULE}"/><text x="{left - 8}" '
            f'y="{down(tick) + 4:.1f}" text-anchor="end" fill="{MUTED}">{_number(tick)}</text>'
        )
    for tick in x_ticks:
        parts.append(
            f'<text x="{across(tick):.1f}" y="{height - bottom + 18}" text-anchor="middle" '
            f'fill="{MUTED}">{_number(tick)}</text>'
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle" '
        f'fill="{MUTED}">{escape(x_label)}</text>'
    )
    for point in shown:
        x, y = across(point.x), down(point.y)
        says = f"{point.label}: {_number(point.x)}, {_number(point.y)}"
        name = (
            f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{INK}">{escape(_short(point.label))}</text>'
            if len(shown) <= 20
            else ""
        )
        parts.append(
            f'<g class="point"><title>{escape(says)}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{SERIES[1]}"/>{name}</g>'
        )
    return _svg(width, height, title, f"{y_label} against {x_label}: {len(shown)} points.", parts)


def _svg(width: int, height: int, title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {_FONT}>'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _ticks(values: Sequence[float], count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 12) for number in range(first, last + 1)]


def _apart(heights: list[float], distance: float) -> list[float]:
    """Push labels down until none covers another."""
    placed = list(heights)
    order = sorted((i for i, y in enumerate(heights) if math.isfinite(y)), key=lambda i: heights[i])
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + distance)
    return placed


def _whole(ticks: Sequence[float], scale: int) -> bool:
    return all(abs(tick * scale - round(tick * scale)) < 1e-6 for tick in ticks)


def _number(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"


def _short_number(value: float) -> str:
    return f"{value:.2f}".removesuffix(".00") if abs(value) < 1000 else f"{value:.3g}"


def _short(name: str) -> str:
    return name if len(name) <= 15 else f"{name[:14]}…"
