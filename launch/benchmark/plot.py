"""A chart's frame, in SVG: axes with round numbers, and marks at values instead of pixels. Host code.

Colours and fonts are the page's: marks have the classes of `launch/benchmark/page.css`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .markup import Element, append, element
from .sections import number

WIDTH = 440  # of every chart, in units that are about a pixel on a page of two columns
_CHARACTER = 6.2  # width of a character of a label, about


class Axis:
    """Values from low to high, evenly or by their logarithms. `ticks` are round numbers within."""

    def __init__(self, low: float, high: float, *, log: bool = False):
        self.low, self.high, self.log = low, high, log

    def share(self, value: float) -> float:
        """Returns where a value lies: 0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(x, 1e-300)) for x in (value, low, high))
        return (value - low) / (high - low) if high > low else 0.5

    def ticks(self, count: int = 5) -> list[float]:
        """Returns about as many round values, or fewer."""
        return (self._decades(count) if self.log else None) or self._even(count)

    def _even(self, count: int) -> list[float]:
        rough = (self.high - self.low) / count
        if rough <= 0:
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        return [i * step for i in range(first, last + 1)]

    def _decades(self, count: int) -> list[float] | None:
        """Returns 1, 10, 100, or with 2 and 5 between; None where there is no room for three."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1,), (1, 2, 5)):
            found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / (count + 2))]
        return None


class Plot:
    """An area between two axes to put marks on.

    Args:
      title: for readers who don't see the chart; also shown where a pointer rests.
      description: for readers who don't see the chart.
      x: the horizontal axis.
      y: the vertical axis.
      height: of the whole; `left`, `right`, `top`, `bottom` are left to labels.
      left: the label's width.
      right: likewise.
      top: the label's height.
      bottom: likewise.
    """

    def __init__(
        self, title: str, description: str, x: Axis, y: Axis, *, height=250, left=50, right=14, top=24, bottom=40
    ):
        self.x_axis, self.y_axis = x, y
        self.left, self.right, self.top, self.bottom = left, WIDTH - right, top, height - bottom
        self.svg = drawing(title, description, height)

    def x(self, value: float) -> float:
        """Returns the pixel of a value on the horizontal axis."""
        return self.left + self.x_axis.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Returns the pixel of a value on the vertical axis."""
        return self.bottom - self.y_axis.share(value) * (self.bottom - self.top)

    def add(self, tag: str, *children: Element | str | None, **attributes) -> None:
        """Adds an element to the drawing."""
        append(self.svg, element(tag, *children, **attributes))

    def x_ticks(self, label: str, form: Callable[[float], str] = number, values: Sequence[float] | None = None) -> None:
        """Draws the axis at the bottom."""
        for value in self.x_axis.ticks() if values is None else values:
            self.add("line", x1=self.x(value), x2=self.x(value), y1=self.bottom, y2=self.bottom + 4, class_="axis")
            self.text(self.x(value), self.bottom + 16, form(value), anchor="middle")
        self.add("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis")
        self.text((self.left + self.right) / 2, self.bottom + 33, label, anchor="middle", class_="label")

    def y_ticks(self, label: str, form: Callable[[float], str] = number) -> None:
        """Draws the axis at the left: its lines, and its name above it."""
        for value in self.y_axis.ticks(4):
            self.add("line", x1=self.left, x2=self.right, y1=self.y(value), y2=self.y(value), class_="grid")
            self.text(self.left - 6, self.y(value) + 4, form(value), anchor="end")
        self.text(0, 10, label, class_="label")

    def line(self, points: Iterable[tuple[float, float]], class_: str) -> None:
        """Draws a line through values (x, y)."""
        self.add("path", d=self._path(points), class_=f"line {class_}")

    def area(self, points: Iterable[tuple[float, float]], class_: str) -> None:
        """Fills the area within values (x, y), from the last one back to the first."""
        self.add("path", d=self._path(points) + "Z", class_=class_)

    def box(self, x: tuple[float, float], y: tuple[float, float], class_: str, tip: str | None = None) -> None:
        """Draws a box between two values on each axis."""
        (x1, x2), (y1, y2) = sorted(map(self.x, x)), sorted(map(self.y, y))
        title = tip and element("title", tip)
        self.add("rect", title, x=x1, y=y1, width=x2 - x1, height=y2 - y1, class_=class_)

    def dot(self, x: float, y: float, class_: str, tip: str | None = None) -> None:
        """Draws a dot at a value (x, y)."""
        title = tip and element("title", tip)
        self.add("circle", title, cx=self.x(x), cy=self.y(y), r=5.0, class_=f"dot {class_}")

    def text(self, x: float, y: float, text: str, *, anchor="start", class_="tick", **more) -> None:
        """Writes a text at a place in pixels, not at values; moves it where it would leave the drawing at a side."""
        half = len(text) * _CHARACTER / 2
        if anchor == "middle":
            x = min(max(x, half), WIDTH - half)
        self.add("text", text, x=x, y=y, text_anchor=anchor, class_=class_, **more)

    def beside(self, x: float, y: float, text: str, gap: float) -> None:
        """Writes a text at the right of a place in pixels, or at its left where there is no room."""
        right = x + gap + 1.15 * _CHARACTER * len(text) < WIDTH
        self.text(x + (gap if right else -gap), y, text, anchor="start" if right else "end", class_="strong")

    def _path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def drawing(title: str, description: str, height: float) -> Element:
    """Returns an empty SVG of every chart's width."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
    )


def shortened(text: str, width: float = WIDTH, *, keep_end: bool = False) -> str:
    """Returns as much of a text as has room, from its beginning or its end, marked where some is left out."""
    room = int(width / _CHARACTER)
    if len(text) <= room:
        return text
    return f"…{text[1 - room :]}" if keep_end else f"{text[: room - 1]}…"
