"""The picture of `outrider bench --synthetic`."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from outrider.cli.roofline import Point, _ticks, roofline

SVG = "{http://www.w3.org/2000/svg}"
BANDWIDTH = 4e12


def picture(*points: Point) -> ElementTree.Element:
    return ElementTree.fromstring(roofline(points, BANDWIDTH, "synthetic <model>", "where & how"))


def test_a_step_at_the_bandwidth_lies_on_the_line_and_a_slower_one_above_it() -> None:
    root = picture(
        Point("target", "K=0", 4e9, 1e-3), Point("target", "K=3", 8e9, 4e-3), Point("draft", "K=3", 1e9, 1e-3)
    )
    line = next(line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray") != "none")
    x1, y1, x2, y2 = (float(line.attrib[name]) for name in ("x1", "y1", "x2", "y2"))
    circles = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in root.iter(f"{SVG}circle")]
    on_the_line = [y1 + (x - x1) * (y2 - y1) / (x2 - x1) for x, _ in circles]
    assert circles[0][1] == pytest.approx(on_the_line[0], abs=0.2)
    # Down is up in a picture: twice the floor is twice as far from the axis.
    assert y1 - circles[1][1] == pytest.approx(2 * (y1 - on_the_line[1]), abs=0.4)
    assert circles[1][0] - x1 == pytest.approx(2 * (circles[0][0] - x1), abs=0.2)


def test_it_says_what_it_is_of() -> None:
    texts = ["".join(text.itertext()) for text in picture(Point("draft", "K=1", 1e9, 1e-3)).iter(f"{SVG}text")]
    assert {"synthetic <model>", "where & how", "4,000 GB/s", "draft K=1"} <= set(texts)


def test_nothing_measured_is_a_picture_too() -> None:
    assert not list(picture().iter(f"{SVG}circle"))


@pytest.mark.parametrize(
    ("end", "ticks"),
    [
        (5.7, [0, 1, 2, 3, 4, 5]),
        (18.9, [0, 5, 10, 15]),
        (0.8, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
        (9, [0, 2, 4, 6, 8]),
    ],
)
def test_axes_have_round_numbers(end: float, ticks: list[float]) -> None:
    assert _ticks(end) == ticks
