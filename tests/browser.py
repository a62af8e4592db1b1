"""A headless Chromium for tests, driven over its DevTools pipe: nothing but the browser is needed, and no port."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab. ``events`` are all that the browser said without being asked."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._buffer, self._last_id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **(pressed | ({"text": text} if text and kind == "keyDown" else {})))


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A tab of a browser with a profile of its own; the browser ends with the block."""
    assert CHROMIUM is not None
    (from_us, requests), (answers, to_us) = os.pipe(), os.pipe()
    redirect = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    command = ["bash", "-c", redirect, "chromium", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    log = (profile.parent / "chromium.log").open("w")
    with log, subprocess.Popen(command, pass_fds=(from_us, to_us), stdout=log, stderr=log) as process:
        os.close(from_us)
        os.close(to_us)
        try:
            tab = Page(requests, answers)
            yield tab
            tab._session = ""
            tab.call("Browser.close")
            process.wait(20)
        finally:
            process.kill()
            os.close(requests)
            os.close(answers)
