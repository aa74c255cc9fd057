"""Draw the rooms of the package for docs/architecture.md, in the order that tests/style/architecture.py checks.

python -m docs.draw_architecture
"""

from __future__ import annotations

from pathlib import Path

from tests.style.architecture import BESIDE, ROOMS, WITHIN

PICTURE = Path(__file__).resolve().parent / "pictures" / "architecture.svg"
CONTENTS = {
    "cli": "commands",
    "serving": "HTTP, vLLM",
    "evaluation": "lm-eval",
    "pipelines": "adapter and models",
    "recipes": "find, copy, run",
    "testing": "contract suites",
    "training": "AdapterTrainer",
    "inspect": "record, plot, doctor",
    "hosts": "frozen models",
    "kv_store": "stored K/V",
    "adapters": "trainable layers",
    "memory": "types of memory=",
    "core": "the softmax",
    "models": "pretrained models",
    "storage": "files",
    "tokenization": "texts",
    "errors": "messages",
    "encoders": "pictures, texts, sounds",
    "data": "rows, batches",
    "retrieval": "indexes, stores",
}
WIDTH, HEIGHT, GAP, TOP = 400, 42, 10, 14


def box(room: str, left: float, top: float, width: float, height: float, colour: str) -> str:
    middle, centre = left + width / 2, top + height / 2
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5" '
        f'fill="{colour}" stroke="#607d8b"/>\n'
        f'<text x="{middle:g}" y="{centre - 3:g}" text-anchor="middle" font-weight="bold">{room}</text>\n'
        f'<text x="{middle:g}" y="{centre + 13:g}" text-anchor="middle" font-size="11" fill="#455a64">'
        f"{CONTENTS[room]}</text>"
    )


def drawn() -> str:
    """The picture: each line of rooms above those that it imports, and beside them the rooms for data."""
    beside = {inner: [outer for outer in WITHIN if WITHIN[outer] == inner] for inner in WITHIN.values()}
    lines = [[name for room in line for name in (room, *beside.get(room, ())) if name in CONTENTS] for line in ROOMS]
    lines = [line for line in reversed(lines) if line]
    parts, tops = [], {}
    for number, line in enumerate(lines):
        top, width = TOP + number * (HEIGHT + GAP), (WIDTH - GAP * (len(line) - 1)) / len(line)
        for place, room in enumerate(line):
            tops[room] = top
            parts.append(box(room, 20 + place * (width + GAP), top, width, HEIGHT, "#eceff1"))
    first, last = tops["training"], tops["memory"]
    share = (last + HEIGHT - first - GAP * (len(BESIDE) - 1)) / len(BESIDE)
    for number, room in enumerate(sorted(BESIDE, key=lambda room: -len(BESIDE[room]))):
        parts.append(box(room, WIDTH + 50, first + number * (share + GAP), 170, share, "#e0f2f1"))
    height = TOP + len(lines) * (HEIGHT + GAP) + 20
    note = (
        f'<text x="20" y="{height - 10}" font-size="11" fill="#455a64">A room imports only from rooms below it.</text>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, note, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
