"""Pictures of the sidecar's web page for these documents: start an engine and ``tierd``, wait some minutes, then

python docs/generate/screenshots.py http://127.0.0.1:8471/
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURES = {"light": (1280, 1500, "light"), "dark": (1280, 1500, "dark"), "narrow": (390, 1500, "dark")}


def main(url: str) -> None:
    images = Path(__file__).parents[1] / "images"
    images.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(url)
            page.wait_for_selector("#shown .step")
            page.wait_for_timeout(3000)  # rates need two events
            page.screenshot(path=images / f"sidecar-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
