"""A headless Chromium that looks at pages: their errors, what sticks out, what is hard to read, and pictures of them.

It is driven by Chromium's DevTools protocol over two pipes, which needs no other package.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

PROBE = """
(() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide > 0) found.push(`the page is ${wide} px wider than the window`);
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return numbers.length < 4 ? [...numbers, 1] : numbers;
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = color[i] / 255;
    return sum + weight * (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const background = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || seen.has(element) || ['SCRIPT', 'STYLE'].includes(element.tagName)) continue;
    seen.add(element);
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    if (!box.width || !box.height || style.visibility === 'hidden' || element.closest('[hidden]')) continue;
    const below = background(element), drawn = element.closest('svg') ? style.fill : style.color;
    if (drawn === 'none') continue;
    const ink = over(parse(drawn), below), pair = [light(ink), light(below)].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.6 && style.fontWeight >= 600) ? 3 : 4.5;
    if (ratio < least) found.push(`contrast ${ratio.toFixed(2)} of ${JSON.stringify(text.slice(0, 40))}`);
    const clips = (one) => ['auto', 'scroll', 'hidden'].includes(getComputedStyle(one).overflowX);
    const scrolls = (one) => one && (clips(one) || scrolls(one.parentElement));
    const outside = box.right > window.innerWidth + 1 || box.left < -1;
    if (outside && !scrolls(element.parentElement) && !element.closest('svg'))
      found.push(`${JSON.stringify(text.slice(0, 40))} lies outside the window`);
  }
  return found;
})()
"""
"""What a visitor would stumble over: text that is cut off, or that has less contrast than WCAG 2.2's level AA."""


class Browser:
    """A browser with one tab."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, os.fdopen(back, "rb")
        self._number, self._session, self.errors = 0, "", list[str]()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps(asked | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        return next(told for told in self._messages() if told.get("id") == self._number)["result"]  # type: ignore[no-any-return]

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            text = b"".join(iter(lambda: self._back.read(1), b"\0"))
            told = json.loads(text)
            event = told.get("method")
            if event == "Runtime.exceptionThrown":
                self.errors.append(told["params"]["exceptionDetails"]["exception"]["description"])
            elif event == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])
            assert "error" not in told, told
            yield told

    def show(self, page: Path | str, width: int, dark: bool) -> None:
        """Loads a page, a file or a URL, in a window of this width (px)."""
        self.errors.clear()
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        next(told for told in self._messages() if told.get("method") == "Page.loadEventFired")

    def evaluate(self, code: str) -> Any:
        """Returns the value of an expression in the page."""
        told = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def problems(self) -> list[str]:
        """Returns what is wrong with the page as it stands."""
        found = self.evaluate(PROBE)
        return [*self.errors, *found]

    def picture(self, file: Path, top: float = 0, height: float | None = None) -> None:
        """Writes a picture of the whole page, or of `height` px from `top` on (.png)."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Starts Chromium with its files in `folder`, and ends it."""
    assert CHROMIUM is not None
    (theirs, to), (back, ours) = os.pipe(), os.pipe()

    def connect() -> None:  # Chromium reads its commands from 3 and answers to 4
        first, second = os.dup(theirs), os.dup(ours)
        os.dup2(first, 3)
        os.dup2(second, 4)

    flags = [
        "--headless",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--remote-debugging-pipe",
    ]
    words = [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, preexec_fn=connect, close_fds=False, stdout=quiet, stderr=quiet)
    try:
        yield Browser(process, to, back)
    finally:
        process.kill()
        process.wait()
        for end in (theirs, to, ours):
            os.close(end)
