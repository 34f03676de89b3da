"""A headless Chromium, driven by its DevTools protocol through pipes: no package is needed."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

#: Seconds that a call may take.
_LONGEST = 120
_READ, _WRITE = 3, 4


class Chromium:
    """A browser with one page.

    Args:
        folder: For its profile.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("Chromium is not installed")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def connect() -> None:
            # Copies first: the pipes may have these numbers themselves.
            for source, target in [(fcntl.fcntl(pipe, fcntl.F_DUPFD, 10), place) for pipe, place in ((commands, _READ), (answers, _WRITE))]:
                os.dup2(source, target)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._read, self._session = itertools.count(1), b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LONGEST
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> Mapping[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            part = os.read(self._answers, 1 << 16) if ready else b""
            assert part, "Chromium does not answer"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        answer: Mapping[str, Any] = json.loads(message)
        return answer

    def evaluate(self, text: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str, width: int = 1280, theme: str = "light") -> None:
        """Load a page and wait until its scripts have run."""
        self.resize(width, theme)
        for page in ("about:blank", address):
            self.call("Page.navigate", url=page)
            # Until the new page is there, expressions run on the old one.
            self.wait_until(f"location.href.startsWith({json.dumps(page.partition('#')[0])}) && document.readyState === 'complete'")

    def wait_until(self, text: str) -> None:
        """Wait until an expression is true on the page."""
        deadline = time.monotonic() + _LONGEST
        while not self.evaluate(text):
            assert time.monotonic() < deadline, f"never true: {text}"
            time.sleep(0.02)

    def resize(self, width: int, theme: str) -> None:
        """Show pages in a window of this width, to a reader who prefers this theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def press(self, key: str, text: str = "", shift: bool = False) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            codes = {"Tab": 9, "Enter": 13, " ": 32}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift, windowsVirtualKeyCode=codes.get(key, 0),
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write a picture of the page."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
