"""A headless browser, driven by its own protocol over two pipes; no library is needed.

Debian has one in the package chromium-headless-shell; CHROMIUM names another.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

PLACED = """
import os, sys
read, write = map(int, sys.argv[1:3])
assert min(read, write) > 4
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that starts a browser with pipes at the file descriptors that it expects."""


def find_browser() -> str | None:
    """Returns the path of an installed browser."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page. Messages of the Chrome DevTools Protocol end with a zero byte."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._rest, self._count, self._session = to, of, b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._of, 1 << 16)
                assert read, "the browser has ended"
                self._rest += read
            line, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def close(self) -> None:
        """Ends the browser."""
        self._session = {}
        self.call("Browser.close")

    def value(self, expression: str) -> Any:
        """Of an expression in JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Its value once that is true."""
        end = time.monotonic() + 120
        while not (value := self.value(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.05)
        return value

    def type_into(self, element: str, text: str) -> None:
        """By keys, behind what is there, which is selected first."""
        self.value(f"document.getElementById('{element}').focus(); document.activeElement.select()")
        self.call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """With the mouse, in its middle."""
        box = f"document.getElementById('{element}').getBoundingClientRect()"
        x, y = self.value(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        for what in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, button="left", clickCount=1)


@contextmanager
def open_page(browser: str) -> Iterator[Page]:
    """Opens a page in a browser, which ends with the context."""
    to_browser, of_page = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        )
        ours = to_browser[0], of_page[1]
        start, quiet = (sys.executable, "-c", PLACED, *map(str, ours), browser), subprocess.DEVNULL
        with subprocess.Popen((*start, *arguments), pass_fds=ours, stdout=quiet, stderr=quiet) as process:
            for end in ours:
                os.close(end)
            try:
                page = Page(to_browser[1], of_page[0])
                yield page
                page.close()
                process.wait(30)
            finally:
                process.kill()
                for end in (to_browser[1], of_page[0]):
                    os.close(end)
