"""A picture of a page of `mmattn explore` while a mouse points at one of its words, as they stand in the README.

    mmattn explore runs/vision -o page.html
    python -m tests.inspect.photograph page.html -o picture.jpg --sample 2 --word 5

It needs a Chromium: on the path, or named by the variable CHROMIUM.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.inspect.chromium import Chromium, find_chromium

LARGEST = 120_000  # bytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="a JPEG")
    parser.add_argument("--sample", type=int, default=1, help="from 1")
    parser.add_argument("--word", type=int, default=1, help="from 1")
    parser.add_argument("--view", type=int, default=1, help="of the list of weights, from 1")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, help="the whole page by default")
    given = parser.parse_args()
    program = find_chromium()
    if program is None:
        parser.error("there is no Chromium: install one, or name it in the variable CHROMIUM")
    with tempfile.TemporaryDirectory() as folder, Chromium(program, Path(folder), given.width) as browser:
        browser.open(given.page)
        for name, number in (("trace", given.sample), ("view", given.view)):
            browser.run(f"document.getElementById('{name}').focus()")
            browser.press(*["ArrowDown"] * (number - 1))
        browser.run("document.activeElement.blur()")
        if given.height is None:
            browser.resize(given.width, browser.run("document.body.offsetHeight"))
        else:
            browser.resize(given.width, given.height)
        browser.point(f"#words button:nth-child({given.word})")
        quality, seen = 90, b""
        while not seen or len(seen) > LARGEST:
            seen, quality = browser.picture("jpeg", quality=quality), quality - 5
    if browser.faults:
        parser.exit(1, "\n".join(browser.faults))
    given.out.write_bytes(seen)
    print(f"{given.out}: {len(seen):,} bytes")


if __name__ == "__main__":
    main()
