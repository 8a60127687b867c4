"""Chromium without a window, driven over a pipe by its DevTools protocol: pages, console, requests, screenshots.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The names under which Chromium is installed."""

SECONDS = 30.0
"""The longest wait for one answer."""


def installed() -> str | None:
    """The path of Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Visit:
    """What happened while a page was loaded and looked at.

    Attributes:
        console: What the page, or the browser about it, wrote to the console.
        requests: Addresses that the page asked for, its own included.
    """

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """One running Chromium with one tab.

    Args:
        program: The path of Chromium.
        folder: A folder for its profile.
    """

    def __init__(self, program: str, folder: Path) -> None:
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={folder}", "--no-first-run", "--disable-background-networking", "about:blank"]
        # No name is resolved: a page that needs the network shows it.
        words.append("--host-resolver-rules=MAP * ~NOTFOUND")
        # The shell moves the pipes to these numbers, which an argument of Popen cannot.
        line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, program, *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._from, False)
        self._unread, self._count, self._session = b"", 0, ""
        self._visit = Visit()

    def __enter__(self) -> "Browser":
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.do(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.kill()
        self._process.wait()

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result.

        Raises:
            RuntimeError: The browser refuses, or gives no answer in time.
        """
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == self._count)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def visit(self, file: Path, width: int = 1200, height: int = 900, dark: bool = False) -> Visit:
        """Load a file at this size of the window; what happened until it was loaded."""
        self._visit = Visit()
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.do("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired")
        # An answer to a later command: messages of the load have arrived before it.
        self.evaluate("1")
        return self._visit

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.do("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Write the whole page as PNG."""
        picture = self.do("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _until(self, matches: Any) -> dict[str, Any]:
        """The first message that `matches` admits; messages before it are noted."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            raw, separator, unread = self._unread.partition(b"\0")
            if separator:
                self._unread = unread
                message: dict[str, Any] = json.loads(raw)
                self._note(message)
                if matches(message):
                    return message
                continue
            try:
                self._unread += os.read(self._from, 1 << 20)
            except BlockingIOError:
                time.sleep(0.002)
        raise RuntimeError("Chromium gives no answer")

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self._visit.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self._visit.console.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self._visit.console.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self._visit.console.append(params["exceptionDetails"]["text"])
