"""Kill a process that encodes rows into a dataset again and again, and let the next one go on.

    python -m tests.stress.kills_in_encoding [KILLS]

The kill (signal 9) comes after up to two shards of pictures, in the first rows of a dataset or in rows that are added.
After each kill the folder holds no dataset yet, or one of its two states, whole. Each dataset ends with the bytes of
one that was never interrupted, and of its contents only those of shards in work were encoded again. Prints one line and
exits with 1 if that is not so.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mmattn import training
from mmattn.errors import MmattnError
from tests.data.encoded_rows import EYE_SLOTS, Eye, captions, contents, encode_captions, encoded
from tests.stress.scripts import Children

ROWS, SHARD = 37, 5
WORK = f"""
import time
from tests.data.encoded_rows import Eye, encode_captions

class Slow(Eye):
    def forward(self, images, **options):
        time.sleep(0.01)
        return super().forward(images, **options)

def work(data, out, log):
    source = data.rpartition("/")[2]
    encode_captions(data, out, Slow(log=log), source=source, append=source == "more", contents_per_shard={SHARD})
"""


def sources_of(out: Path) -> int:
    """How many sources a dataset has, whole; 0 where there is none yet."""
    if not (out / "encoded.json").exists():
        return 0
    dataset = training.EncodedDataset(out)
    sources = len(dataset.manifest.sources)
    if len(dataset) != sources * ROWS or any(row.memory.length != EYE_SLOTS for row in dataset):
        raise ValueError(f"a dataset of {sources} sources has {len(dataset)} rows, or one without its vectors")
    return sources


def killed_encodings(place: Path, kills: int, chance: random.Random) -> tuple[int, int, int]:
    """Kill processes that encode, at least so many; return kills, datasets, and pictures that were encoded again."""
    colours = [[chance.randrange(40) for _ in range(ROWS)] for _ in range(2)]
    data = [captions(place / name, given) for name, given in zip(("data", "more"), colours, strict=True)]
    whole = []
    for source in data:
        options = {"source": source.name, "append": source.name == "more", "contents_per_shard": SHARD}
        encode_captions(source, place / "whole", Eye(), **options)
        whole.append(contents(place / "whole"))
    entries = len({colour for given in colours for colour in given})
    out, log, used, made, again = place / "out", place / "log", 0, 0, 0
    with Children(WORK) as children:
        while used < kills:
            log.write_text("")
            before = used
            for number, source in enumerate(data):
                while sources_of(out) <= number or (out / "encoding").exists():
                    last, seconds = encoded(log) + chance.randrange(2 * SHARD), chance.uniform(0.005, 0.1)

                    def wait(child: int, last: int = last, seconds: float = seconds) -> None:
                        while encoded(log) < last:
                            os.kill(child, 0)
                            time.sleep(0.001)
                        time.sleep(seconds)

                    used += children.killed(f"{source} {out} {log}", wait)
                if contents(out) != whole[number]:
                    raise ValueError(f"the dataset of {number + 1} sources is not what it would have been")
            repeated = encoded(log) - entries
            if repeated > (used - before) * SHARD:
                raise ValueError(f"{repeated} pictures were encoded again after {used - before} kills")
            made, again = made + 1, again + repeated
            shutil.rmtree(out)
    return used, made, again


def main(kills: int = 200) -> int:
    with tempfile.TemporaryDirectory() as place:
        try:
            used, made, again = killed_encodings(Path(place), kills, random.Random(0))
        except (MmattnError, ValueError, RuntimeError) as error:
            print(f"torn: {error}")
            return 1
    print(f"{used} kills: {made} datasets of two sources, 0 torn; {again} pictures were encoded again")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
