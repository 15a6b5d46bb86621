"""The page at ``/`` in a real Chromium: a training run on it, both themes, narrow and wide, and what may go wrong."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from service.web_page import read_files
from tiering.telemetry import (
    ActivationStatus,
    ConfigurationStatus,
    CopyStatus,
    Description,
    DeviceMemoryStatus,
    DirectionStatus,
    DriveStatus,
    GpuStatus,
    LinkStatus,
    PathStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
    TrainingCurve,
)

from .chromium import BLOCKED, CHROMIUM, Open, sync_api
from .conftest import Publish
from .processes import Sidecar, Training, tierd

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: package chromium)"
)

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>&amp;'
MIB = 1 << 20


# Of CSS, what they have and the page uses: look a new word up before it comes in here.
STYLES = (
    "@keyframes @media :has( :not( :nth-child( attr( blur( color-mix( grayscale( inset( light-dark( linear-gradient( "
    "min( minmax( polygon( repeat( repeating-linear-gradient( rotate( scale( var("
)


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
    # The curves of training, of all steps so far.
    tab.shows("#curve-loss figcaption", re.compile(r"Over [\d,]+ steps: loss \d\.\d+ on average"))
    tab.shows("#curve-tokens .now", re.compile(r"of all ranks \d.*/s"))
    tab.shows("#facts", re.compile(r"Tokens\s*\d"))


def test_totals_and_charts_follow_the_figures(visit: Open, watched: Sidecar) -> None:
    tab = visit(watched.url)
    # The headline rates are means over whole steps, without the first of the run, and sums over the ranks.
    assert tab.page.evaluate("""async () => {
        const {overSteps} = await import("/page/totals.js");
        const step = (step, seconds, read_bytes) => ({step, seconds, read_bytes});
        const steps = [step(1, 9, 99), step(2, 1, 4), step(3, 3, 4)];
        return [overSteps([{steps}, {steps}], "read_bytes"), overSteps([{steps: [steps[0]]}], "read_bytes")];
    }""") == [4, None]
    # "Now" of a chart is that of the tables, and a curve that diverged has a gap.
    assert tab.page.evaluate("""async () => {
        const {charts, curveOf, Series} = await import("/page/charts.js");
        const [chart] = charts(), series = new Series();
        for (const at of [1000, 1001]) series.add({at, read: 5, written: 0, h2d: 0, d2h: 0, sent: 0, stall: 0});
        chart.show(series, {read: 7000});
        const curve = {stride: 2, step: [2, 4], seconds: [1, 2], tokens: [8, 8], loss: [3, "NaN"],
            highest_loss: [4, "NaN"], gradient_norm: [null, 1], highest_gradient_norm: [null, 2]};
        const {values} = curveOf({world_size: 3, curve});
        return [chart.figure.querySelector(".now b").textContent, values.loss, values.norm, values.tokens];
    }""") == ["7.00\u00a0kB/s", [3, None], [None, 1], [24, 12]]
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
    themes = ("light", "rgb(246, 247, 249)"), ("dark", "rgb(13, 15, 19)")
    for (scheme, ground), width in zip((*themes, themes[0]), (1280, 360, 2560), strict=True):
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.set_viewport_size({"width": width, "height": 900})
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        tab.check()
    # A wide screen is used: four cards beside each other.
    tops = tab.page.evaluate(
        "['tiers', 'plan', 'bandwidth', 'stall'].map(id => "
        "document.getElementById(id).closest('.card').getBoundingClientRect().top)"
    )
    assert len(set(tops)) == 1
    assert tab.page.evaluate("document.getElementById('facts').clientWidth") > 2400


def test_the_keyboard_reaches_everything(visit: Open, watched: Sidecar) -> None:
    tab = visit(watched.url)
    tab.moves(1)
    reached = []
    for _ in range(100):
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
        PathStatus(
            f"/nvme/{MARKUP}",
            "threads",
            True,
            DirectionStatus(errors=2, errors_by_errno={MARKUP: 2}),
            drive=DriveStatus(0.25, 10**14),
        )
    ],
    gpu=GpuStatus(0.75, 350.0, 61.0),
    peak_flops=4e12,
    curve=TrainingCurve(
        2,
        [2, 4],
        [1.0, 2.0],
        [1.0, 1.0],
        [4.0, 4.0],
        [5.0, math.nan],
        [6.0, math.nan],
        [1.0, 2.0],
        [1.0, 3.0],
    ),
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
            tokens=500,
            flops=1e12,
        )
    ],
)
DESCRIBED = Description(
    MARKUP,
    {MARKUP: MARKUP},
    ConfigurationStatus(MARKUP, MARKUP, settings=[SettingStatus(MARKUP, MARKUP, "file", MARKUP)]),
    links={MARKUP: "javascript:window.hacked=3", "W&B": "https://wandb.ai/run"},
)


@pytest.mark.slow
def test_the_figures_of_a_rank_are_shown(
    sidecar: Sidecar, directory: Path, publishing: Publish, visit: Open
) -> None:
    publishing(directory, SNAPSHOT, DESCRIBED)
    tab = visit(sidecar.url)
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
    tab.shows("#facts", "GPU75\u00a0%350\u00a0W, 61\u00a0°C")
    tab.shows("#facts", "Tokens1,000/s1.00 TFLOP/s a device, MFU 25\u00a0%")
    tab.shows("#paths", "25\u00a0% of the drive's endurance used")
    tab.shows("#links", "javascript:window.hacked=3")
    assert tab.page.locator("#links a").all_inner_texts() == ["W&B"]
    tab.shows("#curve-loss figcaption", "Over 4 steps: loss 5.000 on average")


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
    assert tab.page.locator("#overview").is_hidden()
    (directory / f"{MARKUP[:4]}.1.junk.page").write_bytes(b"TIERPAGE" + bytes(99))
    place = {"data": 0, "<b>sequence": 1}
    second = publishing(directory, replace(SNAPSHOT, rank=1, local_rank=1, steps=[], mesh=place))
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
    tab.shows("#ranks", "1 (data 0, <b>sequence 1)")
    tab.check()
    tab.page.locator("#overview a", has_text="other").click()
    tab.shows("#name", "other")
    tab.shows("#overview tr[aria-current]", "other")
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
