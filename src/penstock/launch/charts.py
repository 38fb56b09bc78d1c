"""Line charts as inline SVG for notebooks and the report. They need no JavaScript and no other library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.launch.markup import Markup, filled, joined

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 26, 30
SMOOTHING_STEPS = 10
MOST_POINTS = 600


def curve_svg(points: Sequence[tuple[float, float]], *, title: str, smooth: bool = True) -> Markup:
    """A chart of (step, value): a thin line for each step, a thick line for the mean of the last ten steps."""
    if not points:
        return Markup()
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks, y_ticks = _ticks(min(xs), max(xs), whole=True), _ticks(min(ys), max(ys))
    low_x, high_x = min(xs[0], x_ticks[0]), max(xs[-1], x_ticks[-1])
    low_y, high_y = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        up = (y - low_y) / ((high_y - low_y) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="{}" font-family="system-ui, sans-serif" font-size="11">'
        f'<text x="{LEFT}" y="15" font-weight="600" fill="#222">{{}}</text>'
    )
    parts = [filled(head, title, title)]
    for tick in y_ticks:
        _, y = at(low_x, tick)
        parts.append(Markup(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'))
        parts.append(Markup(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:g}</text>'))
    for tick in x_ticks:
        x, y = at(tick, low_y)
        parts.append(Markup(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle" fill="#555">{tick:g}</text>'))
    drawn = [at(x, y) for x, y in _thinned(points)]
    parts.append(_line(drawn, "#9ecae1", 1) if smooth else _line(drawn, "#08519c", 2))
    if not smooth:
        parts += [_dot(x, y) for x, y in drawn]
    elif len(points) > 2:
        parts.append(_line([at(x, y) for x, y in _thinned(list(zip(xs, _smoothed(ys), strict=True)))], "#08519c", 2))
    if len(points) == 1:
        parts.append(_dot(*drawn[0]))
    return joined([*parts, Markup("</svg>")])


def _dot(x: float, y: float) -> Markup:
    return Markup(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#08519c"/>')


def _line(points: Sequence[tuple[float, float]], colour: str, width: int) -> Markup:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    every = max(1, len(points) // MOST_POINTS)
    return points if every == 1 else [*points[::every], points[-1]]


def _smoothed(values: Sequence[float]) -> list[float]:
    return [
        sum(window) / len(window)
        for end in range(1, len(values) + 1)
        if (window := values[max(0, end - SMOOTHING_STEPS) : end])
    ]


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers that span the values."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [round(index * step, 10) for index in range(first, last + 1)]
    return [tick for tick in ticks if low <= tick <= high] or ticks if whole else ticks
