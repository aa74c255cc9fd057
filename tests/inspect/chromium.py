"""A headless Chromium, driven through its DevTools pipe: JSON that ends with a NUL, on the descriptors 3 and 4."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--force-color-profile=srgb",
    # Whatever is asked for cannot be found.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
KEYS = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
PATIENCE = 60.0
# Becomes the browser, with the two descriptors where it looks for them.
LAUNCH = "import os, sys\nfor to in (3, 4): os.dup2(int(sys.argv[to - 2]), to)\nos.execv(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str | None:
    """The program that the variable CHROMIUM names, or the first one of the usual names."""
    return shutil.which(os.environ.get("CHROMIUM", "")) or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page in a browser of its own. Use it in a `with` block.

    Args:
        folder: where it keeps its profile and what it says (`chromium.log`).

    `requests` are the addresses that the page asked for since it was opened, `faults` what went wrong in it.
    """

    def __init__(self, program: str, folder: Path, width: int = 1100, height: int = 900, scale: float = 1.0) -> None:
        self.requests: list[str] = []
        self.faults: list[str] = []
        self._last, self._unread, self._session = 0, b"", None
        (theirs, self._to), (self._from, answers) = _pipe(), _pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs), str(answers), program, *FLAGS]
        with open(folder / "chromium.log", "wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                pass_fds=(theirs, answers),
                stdout=log,
                stderr=log,
            )
        os.close(theirs)
        os.close(answers)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{part}.enable")
        self.resize(width, height, scale)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and wait for what it gives back.

        Raises:
            RuntimeError: it is refused, or the browser has ended. TimeoutError: it does not answer.
        """
        self._last += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = json.dumps({"id": self._last, "method": method, "params": given, **session})
        os.write(self._to, message.encode() + b"\0")
        wanted = self._last
        answer = self._until(lambda one: one.get("id") == wanted)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Make the window so large."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def open(self, page: Path) -> None:
        """Show a file, and wait until it has been drawn."""
        self.requests.clear()
        self.faults.clear()
        self.ask("Page.navigate", url=page.absolute().as_uri())
        self._until(lambda one: one.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page.

        Raises:
            RuntimeError: it throws.
        """
        made = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in made:
            raise RuntimeError(f"{script[:80]}: {made['exceptionDetails']}")
        return made["result"].get("value")

    def point(self, selector: str) -> None:
        """Move the mouse over the middle of an element, which is scrolled to."""
        found = f"document.querySelector({json.dumps(selector)})"
        box = f"{found}.scrollIntoView({{ block: 'nearest' }}), ((b) => [b.x + b.width / 2, b.y + b.height / 2])"
        x, y = self.run(f"({box}({found}.getBoundingClientRect()))")
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        for key in keys:
            about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            self.ask("Input.dispatchKeyEvent", type="rawKeyDown", **about)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, kind: str = "png", **given: Any) -> bytes:
        """What is seen, as the bytes of a PNG or JPEG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format=kind, **given)["data"])

    def _until(self, wanted: Any) -> dict[str, Any]:
        """The first message that is wanted; all before it are noted."""
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" not in self._unread:
                if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                    raise TimeoutError(f"the browser said nothing for {PATIENCE:.0f} s")
                more = os.read(self._from, 1 << 16)
                if not more:
                    raise RuntimeError("the browser has ended: see chromium.log in its folder")
                self._unread += more
            text, self._unread = self._unread.split(b"\0", 1)
            message = json.loads(text)
            self._note(message.get("method"), message.get("params", {}))
            if wanted(message):
                return message

    def _note(self, method: str | None, about: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Inspector.targetCrashed"):
            self.faults.append(json.dumps(about))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.faults.append(json.dumps(about["args"]))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are neither 3 nor 4."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write
