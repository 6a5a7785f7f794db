"""A headless Chromium, spoken to over its DevTools socket: enough to open a page, measure it and take its picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The first of the usual programs that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `troubles` collects exceptions, console errors and requests that left the file."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.troubles: list[str] = []
        self._loaded = False

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command and its answer; events that come meanwhile are kept."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    async def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load `url` at this width, CSS pixels, and wait until it is done."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        self._loaded = False
        await self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(await self._socket.receive_json(timeout=60))

    async def value(self, expression: str) -> Any:
        """What a script expression gives."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def picture(self) -> bytes:
        """The whole page as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.troubles.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.troubles.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(("file:", "data:")):
            self.troubles.append(said["request"]["url"])


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A fresh browser with one tab; ended and removed with its profile afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            async with asyncio.timeout(60):
                while b"DevTools listening on ws://" not in (line := await process.stderr.readline()):
                    assert line, "the browser ended before it listened"
            port = line.decode().split("127.0.0.1:")[1].split("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                    tab = next(each for each in await reply.json() if each["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=2**27) as socket:
                    yield Page(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
