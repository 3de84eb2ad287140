"""A page in headless Chromium, controlled over its debugging pipe."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HANGS = 120  # seconds to wait for an event
SETTLES = 120  # seconds to wait for a page to show the expected value


class Browser:
    """Opens a local file and records its requests and script errors."""

    def __init__(self, width: int = 1400, height: int = 1000, dark: bool = False):
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = False
        self.number, self.replies = 0, {}
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.commands = os.pipe()
        self.events, events = os.pipe()
        arguments = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--no-first-run", f"--user-data-dir={self.profile.name}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # Chromium reads commands from descriptor 3 and writes events to 4.
        shell = f'exec 3<&{commands} 4>&{events}; exec "$@"'
        command = ["bash", "-c", shell, "bash", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(commands, events), **quiet)
        os.close(commands)
        os.close(events)
        self.ready = select.poll()
        self.ready.register(self.events, select.POLLIN)
        self.unread, self.session = b"", ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.events)
        self.profile.cleanup()

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, page: Path) -> None:
        self.loaded = False
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self._event()
        self.ask(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )  # wait until it is drawn

    def ask(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, expected: Any) -> None:
        """Wait until the expression has the `expected` value, at least approximately."""
        end = time.monotonic() + SETTLES
        while (found := self.ask(script)) != expected:
            assert time.monotonic() < end, (found, expected)
            time.sleep(0.02)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y) in (("Moved", start), ("Pressed", start), ("Moved", end), ("Released", end)):
            self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button="left", clickCount=1)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        number = self.number
        while number not in self.replies:
            self._event()
        reply = self.replies.pop(number)
        assert "error" not in reply, reply
        return reply["result"]

    def _event(self) -> None:
        while b"\0" not in self.unread:
            assert self.ready.poll(HANGS * 1000), "the browser hangs"
            read = os.read(self.events, 1 << 16)
            assert read, "the browser has ended"
            self.unread += read
        text, _, self.unread = self.unread.partition(b"\0")
        event = json.loads(text)
        parameters = event.get("params", {})
        match event.get("method"):
            case None:
                self.replies[event["id"]] = event
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
