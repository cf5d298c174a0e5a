"""Rows as SVG: tokens per second over batch size, measured and floor, one or two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 236, 44, 56
_COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#be123c")
_MOST_LABEL = 30
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series.

    Attributes:
        label: In the legend.
        points: Batch size and tokens per second.
        is_floor: Drawn dashed.
        colour: Index of its colour.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    is_floor: bool
    colour: int


def draw(runs: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> str:
    """Draw runs.

    Args:
        runs: Label and run; the label is left out of the legend if it is empty.
        title: Above the plot.

    Returns:
        An SVG document.
    """
    lines = _lines(runs)
    points = [point for line in lines for point in line.points]
    if not points:
        return _page(title, ['<text x="80" y="120">nothing was measured</text>'])
    xs, ys = _Axis([x for x, _ in points], 2), _Axis([y for _, y in points], 10)
    body = [*_grid(xs, ys)]
    for index, line in enumerate(lines):
        body += _series(line, xs, ys)
        body += _legend(line, _TOP + 8 + 20 * index)
    return _page(title, body)


class _Axis:
    """A logarithmic axis."""

    def __init__(self, values: list[float], base: int) -> None:
        self.base = base
        low, high = math.log(min(values), base), math.log(max(values), base)
        # A lone value sits in the middle.
        self.low = math.floor(low * 4) / 4 - (0.25 if base == 10 or high == low else 0)  # noqa: PLR2004
        self.high = math.ceil(high * 4) / 4 + (0.25 if high == low else 0)
        if self.high <= self.low:
            self.high = self.low + 0.5

    def place(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        return (math.log(value, self.base) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round values in range, with steps of 1, 2, 5 for base ten."""
        steps = (1, 2, 5) if self.base == 10 else (1,)  # noqa: PLR2004
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * float(self.base) ** power for power in powers for step in steps]
        return [value for value in found if -_ROUNDING <= self.place(value) <= 1 + _ROUNDING]


def _lines(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Line]:
    lines = []
    colour = 0
    for label, run in runs:
        cases = list(dict.fromkeys(row["case"] for row in run["rows"]))
        for case in cases:
            rows = sorted(
                (row for row in run["rows"] if row["case"] == case), key=lambda row: row["batch"]
            )
            name = f"{label}: {case}" if label else case
            for key, is_floor in (("tokens_per_s", False), ("floor_tokens_per_s", True)):
                points = tuple(
                    (float(row["batch"]), float(row[key])) for row in rows if row.get(key)
                )
                if points:
                    text = f"{name}, floor" if is_floor else name
                    lines.append(
                        Line(label=text, points=points, is_floor=is_floor, colour=colour)
                    )
            colour += 1
    return lines


def _x(axis: _Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: _Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.place(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(xs: _Axis, ys: _Axis) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    out = []
    for value in xs.ticks():
        x = _x(xs, value)
        out.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in ys.ticks():
        y = _y(ys, value)
        out.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        out.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_thousands(value)}</text>'
        )
    out.append(
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444"/>'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 16}" text-anchor="middle">'
        "requests at once</text>"
        f'<text transform="translate(18 {(_TOP + bottom) / 2}) rotate(-90)" '
        'text-anchor="middle">tokens per second</text>'
    )
    return out


def _series(line: Line, xs: _Axis, ys: _Axis) -> list[str]:
    colour = _COLOURS[line.colour % len(_COLOURS)]
    places = [(_x(xs, x), _y(ys, y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4" opacity="0.6"' if line.is_floor else ""
    out = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for (x, y), (batch, rate) in zip(places, line.points, strict=True):
        radius = 2 if line.is_floor else 3.5
        tip = f"<title>{escape(line.label)}: {rate:,.1f} tok/s at {batch:g}</title>"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{tip}</circle>')
    return out


def _legend(line: Line, y: float) -> list[str]:
    x = _WIDTH - _RIGHT + 16
    colour = _COLOURS[line.colour % len(_COLOURS)]
    dash = ' stroke-dasharray="5 4" opacity="0.6"' if line.is_floor else ""
    short = len(line.label) <= _MOST_LABEL
    label = line.label if short else line.label[: _MOST_LABEL - 3] + "..."
    return [
        f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<text x="{x + 28}" y="{y + 4}">{escape(label)}</text>',
    ]


def _thousands(value: float) -> str:
    thousand = 1000
    return f"{value / thousand:g}k" if value >= thousand else f"{value:g}"


def _page(title: str, body: list[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        *body,
        "</svg>",
        "",
    ])  # fmt: skip
