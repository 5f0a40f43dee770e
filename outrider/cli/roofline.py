"""A roofline as a picture: bytes that a step reads against the time that it takes, and the line that memory draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 60, 60
_MOST_TICKS = 8
_COLOURS = {"target": "#1f5fa8", "draft": "#b5541c"}
_LABEL_BELOW = {"target": -5, "draft": 14}  # the two kinds' labels keep out of each other's way


@dataclass(frozen=True)
class Point:
    """One step: bytes and seconds, and what to write beside it; `kind` is target or draft."""

    kind: str
    label: str
    bytes: float
    seconds: float


def roofline(points: Sequence[Point], bandwidth: float, title: str, subtitle: str) -> str:
    """An SVG of `points` over the line of `bandwidth` bytes a second. Axes are linear and begin at zero."""
    widest = 1.15 * max((point.bytes for point in points), default=1e9)
    highest = 1.05 * max([widest / bandwidth, *(point.seconds for point in points)])
    body = [
        *_axes(widest, highest),
        _line(_x(0, widest), _y(0, highest), _x(widest, widest), _y(widest / bandwidth, highest), "#444", "6 4"),
        _text(_x(widest, widest) - 4, _y(widest / bandwidth, highest) + 48, f"{bandwidth / 1e9:,.0f} GB/s", "end"),
        *(mark for point in points for mark in _mark(point, widest, highest)),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
            f'<text x="{_LEFT}" y="42" fill="#555">{escape(subtitle)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _axes(widest: float, highest: float) -> Iterator[str]:
    bottom, right = _y(0, highest), _x(widest, widest)
    yield _line(_LEFT, bottom, right, bottom, "#000")
    yield _line(_LEFT, bottom, _LEFT, _TOP, "#000")
    for tick in _ticks(widest * 1e-9):
        yield _text(_x(tick * 1e9, widest), bottom + 18, f"{tick:g}", "middle")
    for tick in _ticks(highest * 1e3):
        yield _text(_LEFT - 6, _y(tick * 1e-3, highest) + 4, f"{tick:g}", "end")
    yield _text((_LEFT + right) / 2, _HEIGHT - 16, "GB that a step reads", "middle")
    yield _text(16, (_TOP + bottom) / 2, "ms", "middle")


def _ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end`: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(end / _MOST_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if end / (factor * power) <= _MOST_TICKS)
    return [float(f"{index * step:.6g}") for index in range(int(end / step) + 1)]


def _mark(point: Point, widest: float, highest: float) -> Iterator[str]:
    x, y = _x(point.bytes, widest), _y(point.seconds, highest)
    colour = _COLOURS[point.kind]
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    yield _text(x + 7, y + _LABEL_BELOW[point.kind], f"{point.kind} {point.label}", "start", colour)


def _x(num_bytes: float, widest: float) -> float:
    return _LEFT + num_bytes / widest * (_WIDTH - _LEFT - _RIGHT)


def _y(seconds: float, highest: float) -> float:
    return _HEIGHT - _BOTTOM - seconds / highest * (_HEIGHT - _TOP - _BOTTOM)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
