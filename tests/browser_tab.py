"""A page in Chromium that a test drives: clicks, keys, wheel, colour scheme, and what the page says and asks for.

Chromium reads commands of its DevTools protocol from one pipe and answers on another (`--remote-debugging-pipe`), JSON
with a zero byte behind each message: no port, no socket and no library.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import FLAGS, Pixels, chromium, read_png

PATIENCE = 120.0  # seconds for one answer, on a busy machine
# The pipes have to be 3 and 4 in the browser.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
}


class Tab:
    """One page; `problems` are errors and warnings of its console, `requests` the addresses that it asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.is_loaded = False

    def open(self, address: str, width: int, height: int) -> None:
        """Show the page at an address and wait until it is there."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Page.navigate", url=address)
        while not self.is_loaded:
            self._take(self._receive())

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, f"chromium did not answer in {PATIENCE:.0f} s"
            read = os.read(self._answers, 1 << 20)
            assert read, "chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _take(self, event: dict[str, Any]) -> None:
        """Something that the page tells by itself."""
        told = event.get("params", {})
        if event.get("method") == "Page.loadEventFired":
            self.is_loaded = True
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(str(told["args"]))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has drawn what it had to."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, after it was brought into it."""
        script = "(it => { it.scrollIntoView({block: 'center', behavior: 'instant'}); return %s; })"
        script += "(document.querySelector(%s))"
        read = "(({x, y, width, height}) => ({x, y, width, height}))(it.getBoundingClientRect())"
        return self.evaluate(script % (read, json.dumps(selector)))

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """A click of the mouse into an element."""
        box = self.box(selector)
        place = {"x": box["x"] + box["width"] * across, "y": box["y"] + box["height"] * down}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        self.settle()

    def turn_wheel(self, selector: str, by: float) -> None:
        """The wheel of the mouse over an element; towards you is more than zero."""
        box = self.box(selector)
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.send("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=by, **place)
        self.settle()

    def press(self, key: str) -> None:
        """One key, where the focus is."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **code)
        self.settle()

    def prefer(self, scheme: str) -> None:
        """A reader who prefers "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def photograph(self, selector: str, file: Path | None = None, scale: float = 1.0) -> Pixels:
        """What an element looks like; smaller is quicker to read."""
        box = self.box(selector)
        offset = self.evaluate("[scrollX, scrollY]")
        clip = {"x": box["x"] + offset[0], "y": box["y"] + offset[1], "width": box["width"], "height": box["height"]}
        clip["scale"] = scale
        answer = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        data = base64.b64decode(answer["data"])
        if file is not None:
            file.write_bytes(data)
        return read_png(data)


@contextmanager
def open_tab(address: str, folder: Path, width: int = 1240, height: int = 900) -> Iterator[Tab]:
    """A page in a browser of its own, which ends with the block."""
    theirs, commands = os.pipe()
    answers, theirs_too = os.pipe()
    flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    start = [sys.executable, "-c", _START, str(theirs), str(theirs_too), chromium(), *flags]
    browser = subprocess.Popen(
        start, pass_fds=(theirs, theirs_too), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    os.close(theirs_too)
    try:
        tab = Tab(commands, answers)
        tab.open(address, width, height)
        yield tab
    finally:
        os.close(commands)  # the browser ends when nobody can give commands
        try:
            browser.wait(20)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        os.close(answers)
