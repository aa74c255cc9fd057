"""The brush behind `flora`: one picture of one plant, drawn with PIL from a short list of shapes and colours.

A picture is drawn several times too large and shrunk, so edges are smooth. All randomness comes from one
`random.Random`, and is drawn in units of the picture, so a seed gives the same flower at every size.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

RGB = tuple[int, int, int]
Color = Sequence[float]
Points = Sequence[Any] | np.ndarray
OVERSAMPLING = 3
GREEN: RGB = (78, 130, 62)
GREY: RGB = (140, 156, 138)

# Half outlines of a petal: (share of the length, share of the half width) from its foot to its tip.
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "round": [(0, 0.12), (0.2, 0.45), (0.5, 0.95), (0.75, 1.05), (0.95, 0.8), (1, 0.4), (1, 0)],
    "notched": [(0, 0.1), (0.2, 0.4), (0.5, 0.85), (0.8, 1.1), (1.02, 0.9), (1.05, 0.45), (0.82, 0)],
    "strap": [(0, 0.35), (0.2, 0.75), (0.6, 1), (0.9, 1), (1, 0.5), (1, 0)],
    "toothed": [(0, 0.3), (0.4, 0.8), (1, 1.1), (0.9, 0.75), (1.02, 0.45), (0.9, 0.2), (1.03, 0)],
    "flared": [(0, 0.12), (0.45, 0.25), (0.7, 0.7), (1, 1.3), (0.84, 0.8), (1.02, 0.5), (0.84, 0.25), (1.05, 0)],
    "pointed": [(0, 0.25), (0.2, 0.75), (0.45, 1), (0.75, 0.6), (0.9, 0.25), (1, 0)],
    "ovate": [(0, 0.3), (0.15, 0.85), (0.4, 1.05), (0.7, 0.85), (0.92, 0.35), (1, 0)],
    "blade": [(0, 0.8), (0.3, 1), (0.7, 0.7), (1, 0)],
    "heart": [(0, 0), (-0.12, 0.45), (-0.02, 1), (0.3, 1.05), (0.7, 0.6), (1, 0)],
    "scallop": [(0, 0.2), (0.1, 0.7), (0.25, 0.6), (0.35, 1), (0.5, 0.8), (0.65, 1), (0.78, 0.6), (0.92, 0.6), (1, 0)],
}
SHARP = {"toothed", "flared", "scallop"}


def rounded(points: np.ndarray, times: int = 2) -> np.ndarray:
    """Cut the corners of a line of points (Chaikin); its two ends stay where they are."""
    for _ in range(times):
        cut = np.empty((2 * len(points) - 2, 2))
        cut[0::2], cut[1::2] = 0.75 * points[:-1] + 0.25 * points[1:], 0.25 * points[:-1] + 0.75 * points[1:]
        points = np.vstack([points[:1], cut, points[-1:]])
    return points


@cache
def outline(form: str) -> np.ndarray:
    """Return the closed outline (n, 2) of a petal of length 1 and half width 1, foot at the origin."""
    half = np.array(OUTLINES[form], dtype=float)
    half = half if form in SHARP else rounded(half)
    return np.vstack([half, (half * (1, -1))[::-1]])


class Brush:
    """Draw shapes in the units of a flower (radius 1, y up) onto a picture, under one light."""

    def __init__(self, image: Image.Image, rng: Random) -> None:
        self.image, self.rng = image, rng
        self.pen = ImageDraw.Draw(image)
        self.side = image.width
        self.light = rng.uniform(0, 2 * math.pi)
        self.hue, self.vivid, self.bright = rng.gauss(0, 0.008), rng.uniform(0.88, 1.08), rng.uniform(0.86, 1.06)
        self.place(0.5, 0.5, 0.4)

    def place(self, x: float, y: float, scale: float, turn: float = 0.0, squash: float = 1.0) -> None:
        """Put the origin of the next shapes at (x, y) of the picture; `squash` tilts them away from the viewer."""
        c, s = math.cos(turn), math.sin(turn)
        self.matrix = np.array([[c, -s], [s * squash, c * squash]]) * (scale * self.side)
        self.origin = np.array([x, y]) * self.side
        self.unit = scale * self.side

    def tint(self, rgb: Color, shade: float = 1.0) -> RGB:
        """Return a colour under this picture's light, `shade` times as bright."""
        h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in rgb))
        r, g, b = colorsys.hsv_to_rgb((h + self.hue) % 1, min(1, s * self.vivid), min(1, v * self.bright * shade))
        return round(255 * r), round(255 * g), round(255 * b)

    def to_picture(self, points: Points) -> list[tuple[float, float]]:
        """Return points of the flower in pixels."""
        return [(float(x), float(y)) for x, y in (np.asarray(points) * (1, -1)) @ self.matrix.T + self.origin]

    def polygon(self, points: Points, rgb: Color, shade: float = 1.0) -> None:
        """Fill an outline."""
        self.pen.polygon(self.to_picture(points), fill=self.tint(rgb, shade))

    def disc(self, x: float, y: float, radius: float, rgb: Color, shade: float = 1.0) -> None:
        """Fill a circle."""
        ((cx, cy),), r = self.to_picture([(x, y)]), radius * self.unit
        self.pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=self.tint(rgb, shade))

    def line(self, points: Points, width: float, rgb: Color = GREEN, shade: float = 1.0) -> None:
        """Draw a line through points."""
        pixels = max(1, round(width * self.unit))
        self.pen.line(self.to_picture(points), fill=self.tint(rgb, shade), width=pixels, joint="curve")

    def petal(
        self,
        form: str,
        angle: float,
        length: float,
        half: float,
        rgb: Color,
        shade: float = 1.0,
        *,
        at: tuple[float, float] = (0, 0),
        rim: float = 0.78,
        tip: Color | None = None,
        vein: Color | None = None,
    ) -> None:
        """Draw a petal from `at` along `angle`: a darker rim, a lighter face, and a tip or a vein."""
        c, s = math.cos(angle), math.sin(angle)
        turn = np.array([[c, s], [-s, c]])
        shape = outline(form)
        glow = shade * (1 + 0.09 * math.cos(angle - self.light))
        self.polygon((shape * (length, half)) @ turn + at, rgb if tip is None else tip, glow * rim)
        if tip is None:
            inner = shape * (length * 0.95, half * 0.84) + (0.015 * length, 0)
        else:
            self.polygon((shape * (length * 0.97, half * 0.88)) @ turn + at, tip, glow)
            inner = shape * (length * 0.68, half * 0.9)
        self.polygon(inner @ turn + at, rgb, glow)
        if vein is not None:
            for share, off in ((0.8, 0.0), (0.66, 0.35), (0.66, -0.35)):
                self.line([at, np.array([share * length, off * half]) @ turn + at], 0.028, vein)


BACKGROUNDS: dict[str, tuple[RGB, RGB]] = {
    "meadow": ((150, 186, 112), (74, 118, 62)),
    "sky": ((176, 206, 232), (216, 226, 214)),
    "soil": ((146, 116, 88), (98, 74, 54)),
    "rock": ((168, 166, 160), (118, 116, 112)),
    "wood": ((84, 112, 76), (40, 60, 42)),
}


def background(side: int, rng: Random) -> Image.Image:
    """Draw a soft background, which has nothing to do with the flower."""
    kind = rng.choice(sorted(BACKGROUNDS))
    top, bottom = (np.array(rgb) * rng.uniform(0.85, 1.12) for rgb in BACKGROUNDS[kind])
    fade = np.linspace(0, 1, 16)[:, None, None]
    small = np.broadcast_to(top * (1 - fade) + bottom * fade, (16, 16, 3))
    grain = np.random.default_rng(rng.getrandbits(32)).normal(0, {"sky": 3, "wood": 12}.get(kind, 9), (16, 16, 1))
    image = Image.fromarray(np.clip(small + grain, 0, 255).astype(np.uint8))
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range({"meadow": 22, "soil": 12, "rock": 7, "wood": 8, "sky": 2}[kind]):
        x, y, wide = rng.random() * side, rng.random() * side, rng.uniform(0.02, 0.09) * side
        lift, shift = rng.uniform(0.1, 0.3) * side, rng.uniform(-0.07, 0.07) * side
        fill = tuple(int(c) for c in np.clip((top if rng.random() < 0.5 else bottom) * rng.uniform(0.85, 1.15), 0, 255))
        if kind == "meadow":
            pen.line([(x, y + lift), (x + shift, y)], fill=fill, width=max(1, side // 90))
        else:
            pen.ellipse((x - wide, y - wide * 0.7, x + wide, y + wide * 0.7), fill=fill)
    return image.filter(ImageFilter.GaussianBlur(side / 110))


# Leaves that are one petal: form, share of the length, share of it as half width, vein.
PLAIN_LEAVES: dict[str, tuple[str, float, float, RGB]] = {
    "lance": ("pointed", 1, 0.15, (150, 180, 120)),
    "heart": ("heart", 0.85, 0.3, (140, 176, 110)),
    "ovate": ("ovate", 0.85, 0.3, (140, 176, 110)),
    "toothed": ("scallop", 0.85, 0.3, (140, 176, 110)),
}


def leaves(brush: Brush, kind: str, foot: tuple[float, float], reach: float) -> None:
    """Draw a few leaves around the foot of a stem; `reach` is their length."""
    rng = brush.rng
    if kind == "ruff":
        return
    if kind == "twig":
        slope = rng.uniform(-0.9, 0.9)
        brush.line([(-4, -4 * slope), (-1, -slope + 0.1), (1, slope), (4, 4 * slope)], 0.16, (104, 76, 64))
        return
    for side in rng.sample((-1, 1, -1, 1), rng.choice((2, 3, 3))):
        angle = math.pi / 2 + side * rng.uniform(0.45, 1.25)
        shade, size = rng.uniform(0.8, 1.15), reach * rng.uniform(0.75, 1.1)
        if kind in ("grass", "grey"):
            angle, green = math.pi / 2 + side * rng.uniform(0.12, 0.6), (96, 140, 110) if kind == "grass" else GREY
            brush.petal("blade", angle, size * 1.3, size * 0.07, green, shade, at=foot)
        elif kind in PLAIN_LEAVES:
            form, length, half, vein = PLAIN_LEAVES[kind]
            brush.petal(form, angle, size * length, size * half, GREEN, shade, at=foot, vein=vein)
        elif kind == "pad":
            end = (foot[0] * 0.3 + side * rng.uniform(0.5, 0.9), rng.uniform(-0.6, 0.4))
            brush.disc(*end, size * 0.45, GREEN, shade * 0.75)
            brush.disc(*end, size * 0.41, GREEN, shade * 0.95)
        else:
            stalked_leaf(brush, kind, foot, angle, size, shade)


def stalked_leaf(brush: Brush, kind: str, foot: tuple[float, float], angle: float, size: float, shade: float) -> None:
    """Draw a round leaf, a trefoil, or a feathery or lobed leaf, on a stalk."""
    length = {"round": 0.8, "trefoil": 0.7}.get(kind, 1) * size
    end = (foot[0] + length * math.cos(angle), foot[1] + length * math.sin(angle))
    if kind == "round":
        brush.disc(*end, size * 0.42, GREEN, shade * 0.85)
        brush.disc(*end, size * 0.37, GREEN, shade)
    elif kind == "trefoil":
        brush.line([foot, end], 0.05, GREEN, shade)
        for turn in (-2.1, 0, 2.1):
            brush.petal("notched", angle + turn, size * 0.36, size * 0.2, GREEN, shade, at=end)
    else:
        count, share, wide = (6, 0.34, 0.1) if kind == "feathery" else (4, 0.32, 0.32)
        brush.line([foot, end], 0.045, GREEN, shade)
        for step in np.linspace(0.25, 1, count).tolist():
            at = (foot[0] + (end[0] - foot[0]) * step, foot[1] + (end[1] - foot[1]) * step)
            leaflet = size * share * (1.15 - 0.5 * step)
            for turn in (-0.75, 0.75):
                brush.petal("pointed", angle + turn, leaflet, leaflet * wide, GREEN, shade, at=at)


Painter = Callable[[Brush, Mapping[str, Any]], None]


def paint(spec: Mapping[str, Any], leaf: str, painters: Mapping[str, Painter], rng: Random, size: int) -> Image.Image:
    """Paint one plant, RGB, `size` pixels a side: background, stem, leaves, one to three flowers."""
    side = size * OVERSAMPLING
    brush = Brush(background(side, rng), rng)
    facing = spec["kind"] in ("radial", "funnel")  # seen from the front, so it may turn freely
    count = rng.choice((1, 1, 1, 2)) if spec["kind"] != "spike" else rng.choice((1, 1, 2))
    count = rng.choice(spec["flowers"]) if "flowers" in spec else count
    base = spec.get("scale", 0.36) * rng.uniform(0.88, 1.1) * {1: 1.0, 2: 0.82, 3: 0.66}.get(count, 0.55)
    turn = rng.uniform(0, 2 * math.pi)
    spread = 0.0 if count == 1 else base * 0.85
    for number in range(count):
        angle = turn + 2 * math.pi * number / count
        x = 0.5 + rng.uniform(-0.06, 0.06) + spread * math.cos(angle)
        y = (0.46 if facing else 0.5) + rng.uniform(-0.05, 0.05) + spread * math.sin(angle) * (1 if facing else 0.3)
        scale = base * (1 if number == count - 1 or count == 1 else rng.uniform(0.8, 1))
        if facing:
            brush.place(x, y, scale)
            foot = (rng.uniform(-0.5, 0.5), -(1 - y) / scale - 0.1)
            if not spec.get("bare"):
                brush.line([(0, 0), (foot[0] * 0.3, foot[1] * 0.5), foot], 0.09, GREEN, 0.9)
            if number == 0:
                low = (foot[0] * 0.6, foot[1] * 0.8)
                leaves(brush, leaf, low, spec.get("leaf_size", 1.3))
            brush.place(x, y, scale, rng.uniform(0, 2 * math.pi), rng.uniform(0.82, 1.0))
        else:
            brush.place(x, y, scale, rng.uniform(-0.16, 0.16))
            if number == 0 and not spec.get("bare"):
                leaves(brush, leaf, (0, -1.15), spec.get("leaf_size", 1.0))
        painters[spec["kind"]](brush, spec)
    return brush.image.resize((size, size), Image.Resampling.BOX)
