"""Load adapter folders whose files were damaged or forged, and see that each is refused or loads as what it says.

    python -m tests.stress.mutated_files [MUTATIONS] [SEED]

Damage: bytes of a file changed, cut off, put in, moved or zeroed, and files exchanged with each other or with those of
another adapter. What it loads, if anything, must be the original. Forgery: the header, the offsets, the shapes, the
metadata or the fields of the config changed at random with every checksum made right again, the copy of the config too.
What loads then must be the original's values under the settings that the file names. Everything else must end in an
AdapterFileError and leave the host without an adapter. Prints one line and exits with 1 if another error came, if what
loaded was wrong, if this process grew by 300 MB, or if a load took a second of its time.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import mmattn
from mmattn.adapters.files import adapter_settings
from mmattn.errors import AdapterFileError
from mmattn.hosts.model import adapted
from tests import tiny
from tests.adapters.adapter_folders import contents

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BLANK = "0" * 64

# What a number, a text or anything else may become.
ODD: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 64, 1023, 1 << 20, 1 << 31, 1 << 59, 1 << 63, 10**30, 0.0, 0.5, 1e-300, 1e300, -0.5),
    *(None, True, False, "", "a", "gated", "decoupled", "chunked", "head", "rms", "F32", "F16", "I8", "BOOL"),
    *("../up", "/etc/passwd", "os.system", "https://a.b/c", "\x00", "ü", "x" * 300, "__metadata__", "__class__"),
    *([], {}, [0], [0, 1], [1, 0], [0, 2], [[[[]]]], {"a": {}}, [0] * 2000, list(range(1500))),
]


def damage(raw: bytes, chance: random.Random) -> bytes:
    """The bytes of a file with one thing wrong: near its beginning as often as anywhere."""
    end = len(raw) if chance.random() < 0.5 else min(len(raw), chance.choice([9, 100, 1000, 4000]))
    a, b = sorted(chance.randrange(end + 1) for _ in range(2))
    b = min(b, a + chance.choice([1, 2, 8, 64, 5000]))
    noise = chance.randbytes(b - a)
    some = bytes(byte ^ (1 << chance.randrange(8)) for byte in raw[a : a + 1])
    return chance.choice(
        [
            raw[:a] + some + raw[a + 1 :],
            raw[:a] + noise + raw[b:],
            raw[:a] + bytes(b - a) + raw[b:],
            raw[:a] + raw[b:],
            raw[:a] + noise + raw[a:],
            raw[:a] + raw[a:b] * 2 + raw[b:],
            raw[b:] + raw[:b],
            raw[:a],
            raw[:a] + bytes(len(raw) - a),
            chance.choice([0, 1, len(raw), 1 << 40, (1 << 64) - 1, chance.getrandbits(20)]).to_bytes(8, "little")
            + raw[8:],
        ]
    )


def mutate(value: Any, chance: random.Random) -> Any:
    """A JSON value with one thing in it changed, lost, doubled, renamed or exchanged."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            places.append((part, key))
            walk(part[key])

    walk(value)
    if not places:
        return chance.choice(ODD)
    part, key = chance.choice(places)
    old = part[key]
    what = chance.randrange(6)
    if what == 0:
        del part[key]
    elif what == 1 and isinstance(part, dict):
        part[chance.choice(["", "z", "blocks.0.gate", "__proto__", key + "x", key.upper()])] = part.pop(key)
    elif what == 2 and isinstance(part, list):
        part.insert(key, copy.deepcopy(old))
    elif what == 3:
        other, name = chance.choice(places)
        part[key] = copy.deepcopy(other[name])
    elif what == 4 and type(old) is int:
        part[key] = old + chance.choice([-1, 1, 4, -4, 1000])
    else:
        part[key] = copy.deepcopy(chance.choice(ODD))
    return value


def taken_apart(raw: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header of a tensor file without its metadata, what its metadata says as plain values, and the tensors."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    info = header.pop("__metadata__")
    return header, info | {name: json.loads(info[name]) for name in ("metadata", "sha256")}, raw[end:]


def put_together(header: Any, info: Any, body: bytes) -> bytes:
    """A tensor file with this header, the checksum of the header made right."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    if isinstance(info, dict):
        info = {name: dump(value) if name in ("metadata", "sha256") else value for name, value in info.items()}
    if isinstance(info, dict) and "header_sha256" in info:
        info = {"header_sha256": BLANK} | {name: value for name, value in info.items() if name != "header_sha256"}
    blank = dump({"__metadata__": info} | header if isinstance(header, dict) else header).encode()
    blank += b" " * (-len(blank) % 8)
    raw = blank.replace(BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)
    return len(raw).to_bytes(8, "little") + raw + body


class Folder:
    """An adapter folder that is written anew with every mutation, the host it is for, and what it held at first."""

    def __init__(self, place: Path) -> None:
        self.folder, self.host = place / "adapter", tiny.make("llama")
        resampler = mmattn.Resampler(num_latents=3, depth=1, num_heads=1, head_dim=5, feed_forward=0.5)
        settings = {"num_heads": 1, "head_dim": 5, "feed_forward": 0.25, "resampler": resampler}
        for name, layers in (("other", (0, 1)), ("adapter", (0, 2))):
            model = tiny.attach(self.host, layers=layers, **settings)
            model.save_adapter(place / name, encoder="OpenCLIP ViT-B-32:laion2b_s34b_b79k")
            adapter = model.adapters["default"]
            model.unload()
        self.values = {key: value.detach().clone() for key, value in adapter.state_dict().items()}
        self.good, self.other = contents(self.folder), contents(place / "other")
        self.now = dict(self.good)

    def damaged(self, chance: random.Random) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Files of which one is damaged or another's."""
        name, what = chance.choice([TENSORS, TENSORS, CONFIG]), chance.random()
        if what < 0.9:
            changed = damage(self.good[name], chance)
        else:
            changed = chance.choice([self.other[name], *self.good.values(), b""])
        return self.good | {name: changed}, json.loads(self.good[CONFIG])["adapter"]

    def forged(self, chance: random.Random) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Files that were changed on purpose, with checksums that are right."""
        header, info, body = taken_apart(self.good[TENSORS])
        config, what = json.loads(self.good[CONFIG]), chance.randrange(4)
        if what == 0:
            header = mutate(header, chance)
        elif what == 1:
            info = mutate(info, chance)
        else:
            for _ in range(chance.choice([1, 1, 2])):
                config = mutate(config, chance)
            info["metadata"] = config
        files = self.good | {TENSORS: put_together(header, info, body)}
        if what >= 2:
            files[CONFIG] = json.dumps(config).encode()
        settings = config.get("adapter") if isinstance(config, dict) else None
        return files, settings if isinstance(settings, dict) else {}

    def write(self, files: dict[str, bytes]) -> None:
        """Put these files there; only what differs from what is there is written."""
        for name, raw in files.items():
            if raw != self.now[name]:
                (self.folder / name).write_bytes(raw)
                self.now[name] = raw

    def load(self, settings: dict[str, Any]) -> str | None:
        """Load what is there: what is wrong with that, None if nothing."""
        with warnings.catch_warnings():
            for said in ("the weights of this", "Initializing zero-element tensors"):
                warnings.filterwarnings("ignore", said)
            model = mmattn.load(self.host, self.folder)
        adapter = model.adapter("default")
        values, found = adapter.state_dict(), adapter_settings(adapter.config)
        model.unload()
        if values.keys() != self.values.keys() or not all(torch.equal(values[x], self.values[x]) for x in values):
            return "it loaded other values"
        if not says(found, settings):
            return f"it loaded as {found}"
        return None


def says(found: Any, settings: Any) -> bool:
    """Return whether settings were loaded as a file has them; null and what it leaves out stand for the default."""
    if isinstance(found, dict) and isinstance(settings, dict):
        return all(name in found and says(found[name], value) for name, value in settings.items())
    return settings is None or (found == settings and isinstance(found, bool) == isinstance(settings, bool))


@dataclass
class Found:
    """What became of the mutated folders: counts, the wrong ones, the slowest load in seconds of CPU time, bytes."""

    refused: int = 0
    loaded: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    growth: int = 0


def fuzz(count: int, seed: int) -> Found:
    """Load so many mutated folders, half of them damaged and half forged."""
    found, process = Found(), psutil.Process()
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place))
        assert folder.load(json.loads(folder.good[CONFIG])["adapter"]) is None
        before = process.memory_info().rss
        for number in range(count):
            chance = random.Random(f"{seed} {number}")
            make: Callable[..., Any] = folder.forged if number % 2 else folder.damaged
            files, settings = make(chance)
            folder.write(files)
            start = time.process_time()
            try:
                problem = folder.load(settings)
                found.loaded += problem is None
            except AdapterFileError:
                found.refused, problem = found.refused + 1, None
            except Exception as error:
                problem = repr(error)
            found.slowest = max(found.slowest, time.process_time() - start)
            if problem is None and adapted(folder.host) is not None:
                problem = "it was refused and left an adapter on the host"
            if problem is not None:
                found.wrong.append(f"mutation {number} of seed {seed}: {problem[:500]}")
                model = adapted(folder.host)
                if model is not None:
                    model.unload()
            if number % 1000 == 0:
                found.growth = max(found.growth, process.memory_info().rss - before)
    found.growth = max(found.growth, process.memory_info().rss - before)
    return found


def main(count: int = 100_000, seed: int = 0) -> int:
    found = fuzz(count, seed)
    print("\n".join(found.wrong[:20]), file=sys.stderr)
    print(
        f"{count} mutated folders, seed {seed}: {found.refused} AdapterFileError, {found.loaded} loaded as they say, "
        f"{len(found.wrong)} wrong; {found.growth / 2**20:.0f} MB grown, the slowest {found.slowest:.3f} s"
    )
    return int(bool(found.wrong) or found.growth > 300 << 20 or found.slowest > 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
