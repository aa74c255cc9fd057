"""Kill a process that encodes rows into a store again and again, and let the next one go on.

    python -m tests.stress.kills_in_encoding [KILLS]

The kill (signal 9) comes after up to two shards of pictures, in the first rows of a store or in rows that are added to
it. After each kill the folder holds no store yet, or one of its two states, whole. Each store ends with
the bytes of one that was never interrupted, and of its contents only those of shards in work were encoded again. Prints
one line and exits with 1 if that is not so.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmattn import training
from mmattn.errors import MmattnError
from tests.data.encoded_rows import EYE_SLOTS, Eye, captions, contents, encode_captions, encoded

ROOT = Path(__file__).resolve().parents[2]
ROWS, SHARD = 37, 5
WRITER = f"""
import os, sys, time
from tests.data.encoded_rows import Eye, encode_captions

class Slow(Eye):
    def forward(self, images, **options):
        time.sleep(0.01)
        return super().forward(images, **options)

for line in sys.stdin:
    data, out, log = line.split()
    child = os.fork()
    if not child:
        append = os.path.basename(data) == "more"
        options = {{"source": os.path.basename(data), "append": append, "contents_per_shard": {SHARD}}}
        encode_captions(data, out, Slow(log=log), **options)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Writers:
    """A process that starts others, which encode and are killed."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def run(self, data: Path, out: Path, log: Path, pictures: int, seconds: float) -> bool:
        """Return True if a process was killed so many pictures and seconds after its start, before its end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{data} {out} {log}\n")
        self.process.stdin.flush()
        before, child = encoded(log), int(self.process.stdout.readline())
        with contextlib.suppress(ProcessLookupError):
            while encoded(log) < before + pictures:
                os.kill(child, 0)
                time.sleep(0.001)
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        ended = int(self.process.stdout.readline())
        if ended not in (0, signal.SIGKILL):
            raise RuntimeError(f"the process ended with {ended}, and not by the kill")
        return ended == signal.SIGKILL

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def sources_of(out: Path) -> int:
    """How many sources a store has, whole; 0 where there is none yet."""
    if not (out / "encoded.json").exists():
        return 0
    store = training.EncodedDataset(out)
    sources = len(store.manifest.sources)
    if len(store) != sources * ROWS or any(row.memory.length != EYE_SLOTS for row in store):
        raise ValueError(f"a store of {sources} sources has {len(store)} rows, or one without its vectors")
    return sources


def killed_encodings(place: Path, kills: int, seed: int) -> tuple[int, int, int, int]:
    """Kill processes that encode, at least so many, until each store is made all the same."""
    chance = random.Random(seed)
    colours = [[chance.randrange(40) for _ in range(ROWS)] for _ in range(2)]
    data = [captions(place / name, given) for name, given in zip(("data", "more"), colours, strict=True)]
    whole = []
    for number, source in enumerate(data):
        options = {"source": source.name, "append": number > 0, "contents_per_shard": SHARD}
        encode_captions(source, place / "whole", Eye(), **options)
        whole.append(contents(place / "whole"))
    entries = len({colour for given in colours for colour in given})
    made = between = again = used = 0
    with contextlib.closing(Writers()) as writers:
        while used < kills:
            out, log, before = place / "store", place / "log", used
            log.touch()
            for number, source in enumerate(data):
                while sources_of(out) <= number or (out / "encoding" / "plan.json").exists():
                    killed = writers.run(source, out, log, chance.randrange(2 * SHARD), chance.uniform(0.005, 0.1))
                    used += killed
                    between += (
                        killed and (out / "encoding" / "plan.json").exists() and bool(list(out.glob("vectors-*")))
                    )
                if contents(out) != whole[number]:
                    raise ValueError(f"the store of {number + 1} sources is not what it would have been")
            repeated = encoded(log) - entries
            if repeated > (used - before) * SHARD:
                raise ValueError(f"{repeated} pictures were encoded again after {used - before} kills")
            made, again = made + 1, again + repeated
            shutil.rmtree(out)
            log.unlink()
    return used, between, made, again


def main(kills: int = 200) -> int:
    with tempfile.TemporaryDirectory() as place:
        try:
            used, between, made, again = killed_encodings(Path(place), kills, seed=0)
        except (MmattnError, ValueError, RuntimeError) as error:
            print(f"torn: {error}")
            return 1
    print(
        f"{used} kills, {between} of them between shards: {made} stores of two sources, 0 torn, each as one made at "
        f"once; {again} pictures were encoded again"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
