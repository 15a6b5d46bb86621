"""The words of the web page: each that a newcomer may not know has an explanation, for the pointer and the keyboard."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from service.web_page import read_files
from tiering.telemetry import CollectiveStatus, TierStatus

from .chromium import CHROMIUM, Open
from .conftest import Publish
from .full_view import SNAPSHOT
from .processes import Sidecar

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: package chromium)"
)

MIB = 1 << 20
CAUSES = ("parameters", "optimizer state", "staging", "gather", "agreement", "copies of gradients")
KINDS = ("parameters", "unsharded groups", "staging", "checkpoint", "idle windows")

# Words that anybody who trains models knows, and columns that say themselves what they are.
PLAIN = set(
    re.split(
        r",\s+",
        """step, step time, samples, tokens, loss, reading, writing, copying, gpu, running for, checkpoint, run, state,
        node, rank, reads, writes, why, first warning, direction, now, total, errors, calls, total sent, copies,
        collective, quantity, planned, measured, difference, forward, backward, live, training, part, time, share,
        to the device, from the device""",
    )
)
# Each place with words of the page that are not values.
PLACES = (
    "#facts dt, th[scope=col], .legend li, #tiers h3, .step-told th[scope=row], #state, #ranks td.left .state, "
    "#collectives th[scope=row]"
)


def test_every_word_has_an_explanation_that_the_keyboard_reaches(
    sidecar: Sidecar, directory: Path, publishing: Publish, visit: Open
) -> None:
    (step, *_) = SNAPSHOT.steps
    stalls = dict.fromkeys(CAUSES, 0.1)
    tier = TierStatus("host", 100 * MIB, 999 * MIB, 50 * MIB, 60 * MIB, dict.fromkeys(KINDS, 10 * MIB))
    publishing(
        directory,
        replace(
            SNAPSHOT,
            world_size=2,
            local_world_size=2,
            tiers=[tier, replace(tier, name="device"), replace(tier, name="nvme")],
            stalls=stalls,
            steps=[replace(step, stall=0.6, stalls=stalls)],
            collectives=[CollectiveStatus(kind, 10, MIB) for kind in ("gather", "reduce", "agreement")],
            gradient_norm=1.5,
            learning_rate=1e-3,
            loss_scale=1024.0,
            skipped_steps=0,
        ),
    )
    tab = visit(sidecar.url)
    tab.shows("#state", "Degraded")
    tab.shows("#facts", "TFLOP/s")
    tab.shows("#tiers", "idle windows")
    tab.shows("#collectives", "agreement")
    shown = tab.page.evaluate(
        """places => [...document.querySelectorAll(places)].filter(each => each.offsetParent).map(each =>
            [each.textContent, [...each.querySelectorAll("abbr")].filter(
                word => word.title && word.tabIndex === 0).length])""",
        PLACES,
    )
    bare = {
        re.sub(r"\s*[\d.,]+.*$|^stall: ", "", text).strip().lower()
        for text, explained in shown
        if not explained
    }
    assert len(shown) > 50
    assert bare - PLAIN - {""} == set()
    # A word in the middle of a sentence, too.
    for word in ("MFU", "TFLOP/s", "budget", "peak", "idle windows", "lr", "stalled"):
        assert tab.page.locator(f"abbr[tabindex='0'] >> text='{word}'").count() > 0, word
    tab.page.locator("#tiers abbr", has_text="idle windows").first.focus()
    tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Tab")
    told = "getComputedStyle(document.activeElement, '::after').content"
    assert tab.page.evaluate("document.activeElement.textContent") == "idle windows"
    assert "that nothing uses at this moment" in tab.page.evaluate(told)
    tab.check()


def test_kinds_of_tiers_are_all_explained() -> None:
    served = {name: file.content.decode() for name, file in read_files().items()}
    kinds = re.search(r"const KINDS = \[(.*?)\]", served["tiers.js"], re.DOTALL)
    assert kinds is not None
    words = re.findall(r'^  "?([^":]+)"?: "', served["words.js"], re.MULTILINE)
    assert len(words) > 40 and len(words) == len(set(words))
    assert set(re.findall(r'"([^"]+)"', kinds[1])) <= set(words)
