"""The page at ``/`` in a real Chromium: a training run on it, both themes, narrow and wide, and what may go wrong."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from service.web_page import read_files
from tiering.telemetry import (
    ActivationStatus,
    ConfigurationStatus,
    CopyStatus,
    Description,
    DeviceMemoryStatus,
    DirectionStatus,
    LinkStatus,
    PathStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

from .conftest import Publish
from .processes import Sidecar, Training, tierd

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine; Debian's package chromium has it"
)

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
QUIET += ["--disable-background-networking", "--disable-component-update"]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa", "best-practice"]
MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>&amp;'
MIB = 1 << 20


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
# Of CSS, what they have and the page uses: look a new word up before it comes in here.
STYLES = (
    "@keyframes @media :has( :not( :nth-child( blur( color-mix( grayscale( inset( light-dark( linear-gradient( min( "
    "minmax( polygon( repeat( repeating-linear-gradient( rotate( scale( var("
)
Open = Callable[..., Visit]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
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


@pytest.fixture(scope="module")
def watched(training: Training) -> Iterator[Sidecar]:
    """The sidecar of an engine that trains."""
    with tierd(training.directory) as process:
        yield process


def test_its_files_are_a_fixed_table() -> None:
    served = read_files()
    page = served["index.html"].content.decode()
    assert "index.html" in served
    paths = set(re.findall(r'(?:src|href)="/page/([^"]+)"', page))
    paths |= {
        name
        for file in served.values()
        for name in re.findall(r'^import .* from "\./([^"]+)";$', file.content.decode(), re.MULTILINE)
    }
    assert paths == set(served) - {"index.html"}
    assert not re.search(r"<style|style=|\son\w+=|<script>", page)
    assert set(re.findall(r"@[a-z-]+|:?[a-z-]+\(", served["tierd.css"].content.decode())) == set(
        STYLES.split()
    )


def test_a_run_is_shown_while_it_trains(visit: Open, watched: Sidecar) -> None:
    tab = visit(watched.url)
    tab.shows("#name", "small-gpt")
    tab.shows("#state", "Training")
    tab.moves(2)
    # What stands still is what the JSON says.
    (run,) = watched.get("/v1/status")["runs"]
    nvme = next(tier for tier in run["ranks"][0]["tiers"] if tier["name"] == "nvme")
    tab.shows("[aria-label='Tier nvme']", f"{nvme['used'] / MIB:.2f}\u00a0MiB of")
    tab.shows("#plan", "as planned")
    tab.shows("#paths", run["ranks"][0]["io"][0]["path"])
    tab.shows("#ranks", re.compile(r"live.*just now"))
    tab.shows("#bandwidth figcaption", re.compile(r"Over \d+ seconds?: read \d.*B/s"))
    assert "Over" in tab.page.locator("#stall .plot").get_attribute("aria-label")
    assert tab.page.title().startswith("small-gpt · step ")
    # Somebody is at work here, while the figures go on.
    tab.page.locator("#settings > summary").click()
    tab.page.locator("#search").fill("run_name")
    tab.shows("#found", "small-gpt")
    tab.page.locator("#stall summary").click()
    tab.page.evaluate("getSelection().selectAllChildren(document.getElementById('name'))")
    tab.page.locator(".steps").focus()
    tab.page.keyboard.press("ArrowLeft")
    top = "document.activeElement.getBoundingClientRect().top"
    chosen, held_at = tab.text(".step-told h3"), tab.page.evaluate(top)
    # What appears further up does not move what is in the window.
    tab.page.evaluate("document.getElementById('name').style.paddingTop = '72px'")
    assert "last" not in chosen
    tab.page.evaluate("for (const each of document.querySelectorAll('#ranks tr')) each.known = true")
    tab.moves(3)
    assert tab.text(".step-told h3") == chosen
    assert tab.page.evaluate("document.activeElement.className") == "steps"
    assert tab.page.evaluate("getSelection().toString()") == "small-gpt"
    assert tab.page.evaluate(top) == pytest.approx(held_at, abs=1)
    assert tab.page.locator("#stall details").get_attribute("open") is not None
    assert tab.page.locator("#found tbody tr").count() == 1
    assert tab.page.evaluate("[...document.querySelectorAll('#ranks tr')].every(each => each.known)")
    # What is copied or sent is drawn from the moment at which something is; and then, without NVMe, nothing of that.
    assert tab.page.evaluate("""async () => {
        const {charts, Series} = await import("/page/charts.js");
        const [chart] = charts(), drawn = [];
        for (const moved of [[1, 2, null, 0, 0], [0, 0, null, null, 5], [0, 2, 7, 8, 0]]) {
            const [read, written, h2d, d2h, sent] = moved, series = new Series();
            series.add({at: 1000, read, written, h2d, d2h, sent, stall: 0});
            chart.show(series);
            drawn.push(chart.plot.series.slice(1).map(one => Number(one.show)).join(""));
        }
        return drawn;
    }""") == ["11000", "11001", "01110"]


@pytest.mark.slow
def test_it_suits_everybody(visit: Open, watched: Sidecar) -> None:
    tab = visit(watched.url)
    tab.moves(1)
    tab.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    tab.shows("#found", "zero_optimization.stage")
    # Contrasts are those of a theme, everything else is of a width: two of the four pairs find what four would.
    for scheme, ground, width in (("light", "rgb(246, 247, 249)", 1280), ("dark", "rgb(13, 15, 19)", 360)):
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.set_viewport_size({"width": width, "height": 900})
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        tab.check()


def test_the_keyboard_reaches_everything(visit: Open, watched: Sidecar) -> None:
    tab = visit(watched.url)
    tab.moves(1)
    reached = []
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        name, visible = tab.page.evaluate(
            "(() => { const {activeElement: at} = document; return [at.id || at.className || at.textContent.trim(), "
            "getComputedStyle(at).outlineStyle !== 'none']; })()"
        )
        reached.append(name)
        if name == "Metrics":
            break
        assert visible, f"the focus on {name} cannot be seen"
    assert reached[:3] == ["skip", "brand", "theme"]
    assert {"steps", "As a table", "wide", "All settings in effect", "Metrics"} <= set(reached)
    tab.page.locator(".steps").focus()
    # At once, since the oldest of the recent steps is none of them after the next.
    selected, text, label = tab.page.evaluate("""() => {
        const steps = document.querySelector(".steps"), oldest = steps.firstElementChild;
        steps.dispatchEvent(new KeyboardEvent("keydown", {key: "Home", bubbles: true}));
        const told = document.querySelector(".step-told h3").textContent;
        return [oldest.getAttribute("aria-selected"), told, oldest.getAttribute("aria-label")];
    }""")
    assert selected == "true"
    assert text in label
    tab.page.keyboard.press("Escape")
    tab.shows(".step-told h3", "the last one")
    # The theme chosen is there again after a reload.
    tab.page.locator("#theme").focus()
    for theme in ("light", "dark"):
        tab.page.keyboard.press("Enter")
        assert tab.page.locator("html").get_attribute("data-theme") == theme
    tab.page.reload()
    assert tab.page.locator("html").get_attribute("data-theme") == "dark"


@pytest.mark.slow
def test_a_token_is_asked_for_and_a_sidecar_that_goes_is_found_again(visit: Open, training: Training) -> None:
    secret = "a-token-of-some-length"
    with tierd(training.directory, TIERD_TOKEN=secret) as first:
        tab = visit(first.url, forgiven="401|ERR_")
        tab.shows("#token-title", "requires a token")
        tab.check()
        for token, answer in (
            ("pasted\u2013badly", "This token has invalid"),
            ("not-this-one", "refused this token"),
            (secret, ""),
        ):
            assert tab.page.evaluate("document.activeElement.id") == "token-text"
            tab.page.keyboard.type(token)
            tab.page.keyboard.press("Enter")
            tab.shows("#token-refused", answer)
        tab.moves(1)
        tab.page.reload()
        tab.moves(1)
        assert secret not in tab.page.url
        first.process.send_signal(signal.SIGKILL)
        tab.shows("#trouble", re.compile(r"does not respond.*Training is not affected"))
        tab.shows("#news", "does not respond")
        step = tab.step()
        tab.check()
        with tab.page.expect_request("**/v1/events*"):
            tab.page.locator("#retry").click()
    with tierd(training.directory, "--port", first.url.rpartition(":")[2], TIERD_TOKEN=secret):
        tab.page.evaluate("document.getElementById('retry').click()")  # it may have come back by itself
        sync_api.expect(tab.page.locator("#trouble")).to_be_hidden(timeout=20_000)
        tab.shows("#news", "responds again")
        tab.moves(1)
        assert tab.step() > step


SNAPSHOT = Snapshot(
    run_name=MARKUP,
    rank=0,
    world_size=2,
    pid=17,
    started_at=1_700_000_000.0,
    step=9,
    run_id=f"{MARKUP}-1",
    node=MARKUP,
    local_world_size=2,
    loss=float("nan"),
    tiers=[
        TierStatus(
            "host", 100 * MIB, 999 * MIB, 50 * MIB, 110 * MIB, {MARKUP: 30 * MIB, "activations": 20 * MIB}
        )
    ],
    io=[
        PathStatus(f"/nvme/{MARKUP}", "threads", True, DirectionStatus(errors=2, errors_by_errno={MARKUP: 2}))
    ],
    activations=ActivationStatus(MIB, 2 * MIB, moved=30 * MIB, read=20 * MIB, written=24 * MIB),
    device_memory=DeviceMemoryStatus(3 * MIB, 4 * MIB, 5 * MIB),
    link=LinkStatus(
        CopyStatus(7 * 10**9, 12, average_bytes_per_second=5e10),
        CopyStatus(10**9, 3, peak_bytes_per_second=2e10),
        51 * 10**9,
    ),
    stalls={MARKUP: 0.5, "activations": 0.25},
    steps=[
        StepRecord(
            9,
            1.0,
            0.25,
            0.5,
            0.25,
            0.75,
            stalls={MARKUP: 0.5, "activations": 0.25},
            activation_bytes=3 * 10**7,
            activation_read_bytes=2 * 10**7,
            activation_written_bytes=24 * 10**6,
        )
    ],
)
DESCRIBED = Description(
    MARKUP,
    {MARKUP: MARKUP},
    ConfigurationStatus(MARKUP, MARKUP, settings=[SettingStatus(MARKUP, MARKUP, "file", MARKUP)]),
)


@pytest.mark.slow
def test_what_pages_say_stays_text_and_runs_come_and_go(
    sidecar: Sidecar, directory: Path, publishing: Publish, visit: Open
) -> None:
    tab = visit(sidecar.url)
    tab.shows("#nothing", "No run yet")
    tab.shows("#where", str(directory))
    tab.check()
    first = publishing(directory, SNAPSHOT, DESCRIBED)
    tab.shows("#name", MARKUP)
    tab.shows("#facts", "diverged")
    tab.shows("#tiers", "110 % of budget")
    tab.shows(
        "#tiers",
        "torch has 3.00\u00a0MiB of GPU memory in tensors, peak 4.00\u00a0MiB, and 5.00",
    )
    tab.shows("#tiers", "activations 20.0\u00a0MiB")
    tab.shows(
        "#tiers",
        "In addition, activations that stay on the device take 1.00\u00a0MiB, peak 2.00\u00a0MiB."
        " Since the start, 30.0\u00a0MiB of activations have left the device; 24.0\u00a0MiB were written to NVMe,"
        " and 20.0\u00a0MiB read.",
    )
    tab.shows(
        "#steps",
        "; of activations, 30.0\u00a0MB left the device, read 20.0\u00a0MB, wrote 24.0\u00a0MB",
    )
    tab.shows("#steps", "for activations250\u00a0ms")
    tab.shows("#copies", "to the device0\u00a0B/s50.0\u00a0GB/s0\u00a0B/s7.00\u00a0GB12")
    tab.shows("#copies", "from the device0\u00a0B/s0\u00a0B/s20.0\u00a0GB/s1.00\u00a0GB3")
    tab.shows("#copies", "Measured before: 51.0\u00a0GB/s each way.")
    tab.shows("#ranks", "to device")
    tab.shows("#facts", "Copying0\u00a0B/s")
    (directory / f"{MARKUP[:4]}.1.junk.page").write_bytes(b"TIERPAGE" + bytes(99))
    second = publishing(directory, replace(SNAPSHOT, rank=1, local_rank=1, steps=[]))
    publishing(
        directory, replace(SNAPSHOT, run_name="other", run_id="other-1", world_size=1, local_world_size=1)
    )
    tab.page.locator("#settings > summary").click()
    tab.shows("#found", MARKUP)
    tab.page.locator("#rank").select_option("1")
    tab.shows("#steps", "No step has ended yet")
    tab.shows("#bandwidth-title", "of all ranks")
    tab.shows("#facts", "Step time\u2013")
    assert "rank=1" in tab.page.url
    tab.check()
    tab.page.locator("#run").select_option(label="other")
    tab.shows("#name", "other")
    link = tab.page.url
    assert link.endswith("#run=other-1")
    tab.page.locator("#run").select_option(label=MARKUP)
    tab.shows("#name", MARKUP)
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    first.close()
    tab.shows("#state", "Degraded")
    second.close()
    other = visit(link, script=BLOCKED)
    other.shows("#name", "other")
    other.page.evaluate("location.hash = 'run=long-gone'")
    other.shows("#elsewhere", "long-gone")
    other.page.locator("#theme").click()
    other.shows("#theme", "Light")
    tab.shows("#ended", MARKUP)
    tab.shows("#elsewhere", MARKUP)
    tab.check()
