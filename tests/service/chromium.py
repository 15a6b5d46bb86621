"""Pages in a real Chromium: they are opened as in the oldest supported browser, and their faults are collected."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
QUIET += ["--disable-background-networking", "--disable-component-update"]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa", "best-practice"]


@dataclass(frozen=True)
class Visit:
    """A page in the browser, and what went wrong on it so far."""

    page: Any
    faults: list[str]

    def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until it does."""
        sync_api.expect(self.page.locator(selector)).to_contain_text(text, timeout=20_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def step(self) -> int:
        """The number that the header tells."""
        return int(self.text("#facts dd >> nth=0").replace(",", ""))

    def moves(self, steps: int = 1) -> None:
        """Wait until so many more steps are told."""
        self.page.wait_for_function(
            "after => Number(document.querySelector('#facts dd').textContent.replaceAll(',', '')) >= after",
            arg=self.step() + steps,
            timeout=20_000,
        )

    def check(self) -> None:
        """No rule of accessibility is broken, nothing sticks out at the side, no number is none."""
        self.page.evaluate(AXE)
        report = self.page.evaluate(
            "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, resultTypes: ['violations']})",
            TAGS,
        )
        broken = [
            (
                violation["id"],
                [(node["html"][:120], node["failureSummary"]) for node in violation["nodes"][:3]],
            )
            for violation in report["violations"]
        ]
        assert broken == []
        assert report["passes"], "axe looked at nothing"
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # At one moment, because the page changes. Warnings and advice explain what null and NaN mean.
        text, *explained = self.page.evaluate(
            "[document.body, ...document.querySelectorAll('#warnings, #found')].map(each => each.innerText)"
        )
        for words in explained:
            text = text.replace(words, "") if words else text
        assert not re.search(r"NaN|undefined|null|\[object", text)


# What the oldest browsers that docs/tools/sidecar.md names do not have is missing here, too (Safari 17.5, Firefox 120).
OLDEST = """
delete ReadableStream.prototype[Symbol.asyncIterator];
delete ReadableStream.prototype.values;
for (const [owner, name] of [
  [globalThis, "Iterator"], [Array, "fromAsync"], [Promise, "try"], [Promise, "withResolvers"], [Map, "groupBy"],
  [Object, "groupBy"], [RegExp, "escape"], [Uint8Array, "fromBase64"], [Set.prototype, "union"], [URL, "parse"],
  [globalThis, "scheduler"], [globalThis, "requestIdleCallback"], [globalThis, "navigation"],
  [Document.prototype, "startViewTransition"], [Document, "parseHTMLUnsafe"], [Element.prototype, "moveBefore"],
]) delete owner[name];
for (const name of ["map", "filter", "take", "drop", "flatMap", "reduce", "toArray", "forEach", "some",
  "every", "find"])
  delete Object.getPrototypeOf(Object.getPrototypeOf([][Symbol.iterator]()))[name];
"""
# As where a browser blocks site data.
BLOCKED = """
for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, {get() { throw new DOMException("blocked", "SecurityError"); }});
"""
Open = Callable[..., Visit]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; it is closed when the block ends."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def visits_of(browser: Any) -> Iterator[Open]:
    """``visit(url, forgiven=None, script="")`` opens a page that must stay free of faults.

    It is told four statuses a second. Faults are errors on the console, among them those of the content security
    policy, exceptions, and requests to elsewhere. ``forgiven`` matches those that the test brings about. ``script``
    runs before those of the page.
    """
    contexts, visits = [], []

    def opened(url: str, *, forgiven: str | None = None, script: str = "") -> Visit:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        contexts.append(context)
        context.add_init_script(OLDEST + script)
        context.route(
            "**/v1/events*", lambda route: route.continue_(url=route.request.url.replace("=1", "=0.25"))
        )
        page = context.new_page()
        faults: list[str] = []

        def on_console(message: Any) -> None:
            if message.type in ("error", "warning") and not (forgiven and re.search(forgiven, message.text)):
                faults.append(message.text)

        origin = "/".join(url.split("/")[:3]) + "/"
        page.on("console", on_console)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((origin, "data:")) or faults.append(request.url)
        )
        page.goto(url)
        visits.append(Visit(page, faults))
        return visits[-1]

    yield opened
    for context in contexts:
        context.close()
    assert [visit.faults for visit in visits] == [[]] * len(visits)
