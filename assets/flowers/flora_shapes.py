"""One painter for each kind of flower: radial, funnel, cup, bell, spike, head, umbel and more.

A painter draws with a `Brush` in the units of a flower (radius 1, y up), from the entry `draw` of `flora_species.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .flora_draw import GREEN, Brush, Painter, rounded

Spec = Mapping[str, Any]
TAU = 2 * math.pi


def polar(radius: float, angle: float) -> tuple[float, float]:
    """Return the point of this radius and angle."""
    return radius * math.cos(angle), radius * math.sin(angle)


def ring(brush: Brush, number: int, radius: float, dot: float, rgb: list[int], turn: float = 0.0) -> None:
    """Draw `number` dots on a circle."""
    for i in range(number):
        brush.disc(*polar(radius, turn + TAU * i / number), dot, rgb, brush.rng.uniform(0.85, 1.1))


def radial(brush: Brush, spec: Spec) -> None:
    """Paint petals around a centre, in one or more rings, from the front."""
    if "ruff" in spec:
        for i in range(12):
            brush.petal("blade", TAU * i / 12, 1.22, 0.13, spec["ruff"])
    radial_petals(brush, spec)
    number, half = spec["count"], spec.get("half", 0.3)
    if "blotch" in spec:
        for i in range(number):
            brush.petal("round", TAU * i / number, spec.get("blotch_reach", 0.42), half * 0.42, spec["blotch"], rim=1.0)
    for rgb, radius in spec.get("eye", []):
        brush.disc(0, 0, radius, rgb)
    for inner, outer, strokes, rgb in spec.get("filaments", []):
        for angle in (TAU * i / strokes for i in range(strokes)):
            brush.line([polar(inner, angle), polar(outer, angle)], 0.045, rgb, brush.rng.uniform(0.85, 1.1))
    radial_centre(brush, spec)


def radial_petals(brush: Brush, spec: Spec) -> None:
    """Paint the rings of petals, every other petal first."""
    rng, number, half = brush.rng, spec["count"], spec.get("half", 0.3)
    for layer in range(spec.get("layers", 1)):
        length = spec.get("shrink", 0.76) ** layer
        rgb = spec["rgb2"] if layer and "rgb2" in spec else spec["rgb"]
        form = spec["form2"] if layer and "form2" in spec else spec["form"]
        for i in [*range(0, number, 2), *range(1, number, 2)]:
            angle = TAU * (i + layer / 2) / number + rng.gauss(0, 0.035)
            reach = length * rng.uniform(0.94, 1.05) * (0.8 if spec.get("uneven") and i % 2 else 1)
            wide = half * rng.uniform(0.93, 1.06)
            brush.petal(form, angle, reach, wide, rgb, tip=spec.get("tip"), vein=spec.get("vein"))
            for _ in range(4 if "spots" in spec else 0):
                at, off = rng.uniform(0.25, 0.62) * length, rng.uniform(-0.1, 0.1)
                c, s = math.cos(angle), math.sin(angle)
                brush.disc(at * c - off * s, at * s + off * c, 0.035, spec["spots"])


def radial_centre(brush: Brush, spec: Spec) -> None:
    """Paint corona, disc, stamens, knobs or column in the middle."""
    rng = brush.rng
    if "corona" in spec:
        rgb, radius = spec["corona"]
        ring(brush, 12, radius * 0.92, radius * 0.24, rgb)
        brush.disc(0, 0, radius, rgb)
        brush.disc(0, 0, radius * 0.72, rgb, 0.72)
        ring(brush, 6, radius * 0.25, radius * 0.14, [250, 220, 90])
    if "disc" in spec:
        rgb, radius = spec["disc"]
        brush.disc(0, 0, radius, rgb, 0.8)
        brush.disc(0, 0.03, radius * 0.86, rgb)
        ring(brush, max(6, round(radius * 26)), radius * 0.58, radius * 0.13, [min(255, c + 24) for c in rgb])
    if "stamens" in spec:
        rgb, radius, count = spec["stamens"]
        for i in range(count):
            angle, reach = TAU * i / count + rng.gauss(0, 0.06), radius * rng.uniform(0.75, 1.05)
            brush.line([(0, 0), polar(reach, angle)], 0.03, rgb, 0.85)
            brush.disc(*polar(reach, angle), 0.055, rgb)
    for rgb, count, radius, dot in spec.get("knobs", []):
        ring(brush, count, radius, dot, rgb, 0.3)
    if "column" in spec:
        brush.line([(0, 0), (0.45, 0.2), (0.85, 0.3)], 0.1, spec["column"])
        for i in range(9):
            brush.disc(0.5 + 0.045 * i, 0.22 + 0.02 * i + rng.uniform(-0.08, 0.08), 0.055, [250, 214, 70])


def funnel(brush: Brush, spec: Spec) -> None:
    """Paint a round funnel with a pale star (morning glory)."""
    t = np.linspace(0, TAU, 60, endpoint=False)
    edge = 1 - 0.07 * np.abs(np.sin(2.5 * t)) ** 3
    circle = np.stack([np.cos(t), np.sin(t)], 1) * edge[:, None]
    brush.polygon(circle, spec["rgb"], 0.82)
    brush.polygon(circle * 0.95, spec["rgb"])
    for i in range(5):
        brush.petal("pointed", TAU * (i + 0.5) / 5, 0.98, 0.11, spec["star"], rim=1.0)
    brush.disc(0, 0, 0.36, spec["star"])
    brush.disc(0, 0, 0.25, spec["throat"])
    brush.disc(0, 0, 0.09, [250, 236, 150])


def cup(brush: Brush, spec: Spec) -> None:
    """Paint an upright cup from the side (tulip, crocus)."""
    slim, low = spec.get("slim", 1.0), spec.get("low", -0.55)
    brush.line([(0, low), (0.06, -3)], spec.get("stem", 0.11), spec.get("stem_rgb", GREEN))
    if "stigma" in spec:
        for x in (-0.12, 0, 0.12):
            brush.line([(0, 0), (x, 0.98)], 0.09, spec["stigma"])
    for lean in (-0.42, 0.42):
        brush.petal("ovate", math.pi / 2 + lean * slim, 1.45, 0.36 * slim, spec["rgb"], at=(0, low), rim=0.68)
    for lean in (-0.3, 0.3):
        brush.petal("ovate", math.pi / 2 - lean * slim, 1.38, 0.42 * slim, spec["rgb"], at=(0.12 * lean, low), rim=0.72)
    brush.petal("ovate", math.pi / 2, 1.32, 0.44 * slim, spec["rgb"], at=(0, low), vein=spec.get("vein"), rim=0.72)


def bell(brush: Brush, spec: Spec) -> None:
    """Paint a nodding flower on an arched stem: bell (harebell), drop (snowdrop) or skirt (fuchsia)."""
    way, rgb, down = brush.rng.choice((-1, 1)), spec["rgb"], -math.pi / 2
    brush.line([(way * 0.75, -3), (way * 0.72, 0.4), (way * 0.5, 0.95), (way * 0.2, 1.05), (0, 0.8)], 0.08)
    if spec["style"] == "bell":
        rim = [(-0.74, -0.95), (-0.42, -0.7), (-0.25, -1.02), (0, -0.74), (0.25, -1.02), (0.42, -0.7), (0.74, -0.95)]
        wall = [(0.56, -0.4), (0.5, 0.2), (0.36, 0.6), (0.12, 0.8)]
        shape = np.array([*rim, *wall, *[(-a, b) for a, b in wall[::-1]]])
        brush.polygon(shape, rgb, 0.78)
        brush.polygon(shape * (0.9, 0.95) + (0, 0.01), rgb)
        for a in (-0.3, 0, 0.3):
            brush.line([(a * 0.5, 0.65), (a, -0.55)], 0.035, rgb, 0.78)
        brush.disc(0, 0.8, 0.15, GREEN)
    elif spec["style"] == "drop":
        brush.petal("round", down, 0.85, 0.26, rgb, at=(0, 0.8 - 0.25))
        brush.disc(0, -0.18, 0.13, spec["mark"])
        for lean, length, half in ((-0.48, 1.4, 0.3), (0.48, 1.4, 0.3), (0.0, 0.95, 0.22)):
            brush.petal("ovate", down + lean, length, half, rgb, at=(0, 0.8 - 0.2), rim=0.84)
        brush.petal("heart", math.pi / 2, 0.2, 0.12, spec["mark"], at=(0, -0.32))
        brush.disc(0, 0.68, 0.2, GREEN)
    else:
        for a in (-0.14, -0.05, 0.05, 0.14):
            brush.line([(a, 0), (a * 1.6, -1.25)], 0.035, [214, 60, 110])
        for lean in (-0.3, 0.3, 0.0):
            brush.petal("round", down + lean, 0.85, 0.3, spec["rgb2"], at=(0, 0.1))
        for lean in (-1.25, 1.25, -0.5, 0.5):
            brush.petal("pointed", down + lean, 1.0, 0.2, rgb, at=(0, 0.32))
        brush.line([(0, 0.25), (0, 0.9)], 0.2, rgb, 0.9)


def spike(brush: Brush, spec: Spec) -> None:
    """Paint many small flowers up one stem: bells, beads, peas, tufts or tubes."""
    rng, style, rgb = brush.rng, spec["style"], spec["rgb"]
    bend = rng.uniform(-0.12, 0.12)
    brush.line([(-bend, -3), (0, -0.9), (bend * 0.5, 0.2), (bend, 1.1)], 0.08, spec.get("stem_rgb", GREEN))
    rows, wide = spec.get("rows", 8), spec.get("wide", 0.32)
    for row in range(rows - 1, -1, -1):
        share = row / (rows - 1)
        y, taper, middle = -0.95 + 2.05 * share, 1.08 - 0.72 * share, bend * (share - 0.4)
        mix = [round(a * (1 - share) + b * share) for a, b in zip(rgb, spec.get("rgb2", rgb), strict=True)]
        for side in (-1, 1, 0) if style != "bells" else (-1, 1):
            x = middle + side * wide * taper * rng.uniform(0.8, 1.1)
            shade, lift = rng.uniform(0.82, 1.12), y + rng.uniform(-0.05, 0.05)
            if style == "bells":
                angle, at = -math.pi / 2 + side * 0.75, (middle, lift + 0.12)
                brush.petal("strap", angle, 0.62 * taper, 0.2 * taper, mix, shade, at=at)
                end = np.add(at, polar(0.56 * taper, angle))
                brush.disc(*end, 0.14 * taper, spec["mouth"])
                brush.disc(*end, 0.06 * taper, rgb, 0.6)
            elif style == "beads":
                brush.disc(x, lift, 0.17 * taper + 0.03, mix, 0.75 * shade)
                brush.disc(x, lift, 0.13 * taper + 0.02, mix, shade)
                brush.disc(x, lift - 0.11 * taper, 0.05, [235, 240, 250])
            elif style == "peas":
                angle = math.pi / 2 - side * 0.9
                brush.petal("round", angle, 0.32 * taper + 0.05, 0.15 * taper, mix, shade, at=(x, lift))
                brush.disc(x, lift - 0.02, 0.08 * taper, spec["mouth"], shade)
            elif style == "tufts":
                for lean in (-0.5, 0, 0.5):
                    brush.petal("ovate", math.pi / 2 - side * 0.5 + lean, 0.28, 0.075, mix, shade, at=(x, lift))
            else:
                angle = -math.pi / 2 + side * 0.55
                brush.petal("strap", angle, 0.44, 0.07, mix, shade, at=(middle + side * 0.1, lift + 0.1))


def plume(brush: Brush, spec: Spec) -> None:
    """Paint arching sprays of tiny heads (goldenrod)."""
    rng = brush.rng
    brush.line([(0, -3), (0.05, 0.9)], 0.09)
    for step in range(6):
        for side in (-1, 1):
            share = step / 5
            y, reach = -0.5 + 1.45 * share, (1.05 - 0.75 * share) * rng.uniform(0.85, 1.1)
            arc = [(0.0, y - 0.15), (side * reach * 0.5, y + 0.22), (side * reach, y + 0.05)]
            brush.line(arc, 0.05, GREEN)
            for at in np.linspace(0.15, 1, 7).tolist():
                x, h = side * reach * at, y - 0.15 + 0.72 * at - 0.52 * at**2
                brush.disc(x, h + rng.uniform(0, 0.06), rng.uniform(0.07, 0.11), spec["rgb"], rng.uniform(0.8, 1.1))


def head(brush: Brush, spec: Spec) -> None:
    """Paint a round head of many narrow florets: a globe (clover), or a brush in a prickly cup (thistle)."""
    rng, rgb = brush.rng, spec["rgb"]
    brush.line([(0, -0.3), (0.08, -3)], 0.11)
    if spec["style"] == "globe":
        for layer, (count, length) in enumerate(((20, 0.95), (16, 0.78), (12, 0.58), (7, 0.36))):
            for i in range(count):
                tint = [c * rng.uniform(0.86, 1.1) for c in (spec["rgb2"] if layer == 0 else rgb)]
                reach = length * rng.uniform(0.9, 1.05)
                brush.petal("pointed", TAU * (i + layer / 2) / count, reach, 0.11, tint, at=(0, 0.05))
        return
    for i in range(26):
        angle = math.pi / 2 + (i / 25 - 0.5) * 2.0 + rng.gauss(0, 0.04)
        tint = [c * rng.uniform(0.8, 1.15) for c in rgb]
        brush.petal("strap", angle, rng.uniform(1.05, 1.3), 0.05, tint, at=(0, -0.3))
    brush.disc(0, -0.42, 0.5, [96, 138, 84], 0.85)
    for i in range(22):
        angle = math.pi + (i / 21) * math.pi
        for reach in (0.42, 0.68):
            brush.petal("blade", angle, reach, 0.05, [128, 164, 104], at=(0, -0.36))


def umbel(brush: Brush, spec: Spec) -> None:
    """Paint an umbrella of tiny flowers on thin rays (cow parsley)."""
    rng = brush.rng
    brush.line([(0, -0.6), (0.06, -3)], 0.09)
    angles = enumerate(np.linspace(-1.45, 1.45, 8).tolist())
    tops = [(math.sin(a), 0.42 * math.cos(a) + 0.1 + 0.1 * (i % 2)) for i, a in angles]
    tops += [(-0.42, 0.12), (0.0, 0.2), (0.42, 0.12)]
    for top in tops:
        brush.line([(0, -0.6), top], 0.045)
    for x, y in tops:
        for _ in range(8):
            a, r = rng.uniform(0, TAU), rng.uniform(0.03, 0.19)
            at = (x + r * math.cos(a), y + r * 0.6 * math.sin(a))
            brush.disc(*at, 0.07, spec["rgb"], rng.uniform(0.88, 1.06))


def spathe(brush: Brush, spec: Spec) -> None:
    """Paint one wrapped bract around a finger of tiny flowers (calla lily)."""
    way = brush.rng.choice((-1, 1))
    brush.line([(0, -0.5), (0, -3)], 0.15)
    shape = [(-0.1, -1), (-0.45, -0.35), (-0.7, 0.4), (-0.4, 0.95), (0.15, 0.85), (0.6, 1.3), (0.75, 0.5), (0.5, -0.3)]
    wrap = rounded(np.array([*shape, (0.12, -1)]) * (way, 1))
    brush.polygon(wrap, spec["rgb"], 0.8)
    brush.polygon(wrap * 0.93, spec["rgb"])
    inner = np.array([(-0.02, -0.3), (-0.5, 0.35), (-0.28, 0.74), (0.2, 0.68), (0.52, 0.85), (0.5, 0.3), (0.02, -0.3)])
    brush.polygon(rounded(inner * (way, 1)), spec["rgb"], 0.86)
    brush.line([(0.02, -0.05), (way * 0.1, 0.62)], 0.16, spec["finger"])


def orchid(brush: Brush, spec: Spec) -> None:
    """Paint three spread sepals and a furry lip like a bee (bee orchid)."""
    brush.line([(0, -3), (0, 0.1)], 0.1)
    for angle in (math.pi / 2, math.pi / 2 + 1.95, math.pi / 2 - 1.95):
        brush.petal("ovate", angle, 1.05, 0.32, spec["rgb"], at=(0, 0.15), vein=(170, 190, 150))
    for side in (-1, 1):
        brush.petal("blade", math.pi / 2 + side * 0.8, 0.4, 0.1, [150, 170, 100], at=(0, 0.15))
    brush.petal("round", -math.pi / 2, 0.85, 0.4, spec["lip"], at=(0, 0.1))
    brush.petal("round", -math.pi / 2, 0.45, 0.24, [226, 176, 60], at=(0, 0.02), rim=1.0)
    brush.petal("round", -math.pi / 2, 0.3, 0.15, spec["lip"], at=(0, 0.02), rim=1.0)


def arch(brush: Brush, spec: Spec) -> None:
    """Paint a leaning stem hung with a row of hearts (bleeding heart)."""
    way = brush.rng.choice((-1, 1))
    stem, red = [(-1.25, 0.3), (-0.625, 0.8), (0.0, 0.95), (0.625, 0.85), (1.25, 0.55)], [150, 84, 84]
    stem = [(x * way, y) for x, y in stem]
    brush.line([(-1.5 * way, -2.5), *stem], 0.08, red)
    for i, (x, top) in enumerate(stem[1:], start=1):
        size, y = 0.95 - 0.12 * i, top - 0.2
        brush.line([(x, top), (x, y)], 0.05, red)
        brush.petal("pointed", -math.pi / 2, size, 0.13 * size, [246, 240, 240], at=(x, y - 0.45 * size), rim=0.9)
        brush.petal("heart", -math.pi / 2, 0.72 * size, 0.42 * size, spec["rgb"], at=(x, y))


PAINTERS: dict[str, Painter] = {
    "radial": radial, "funnel": funnel, "cup": cup, "bell": bell, "spike": spike, "plume": plume, "head": head,
    "umbel": umbel, "spathe": spathe, "orchid": orchid, "arch": arch,
}  # fmt: skip
