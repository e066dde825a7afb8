"""Takes the pictures in docs/images from a real server: `python -m tests.dashboard.screenshots FOLDER [MODEL]`."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.dashboard.browser import start_browser
from tests.dashboard.pages import Page
from tests.server.running_server import start_server
from tests.tiny import write_tiny_checkpoint

COLOURS = 128
BUSY = "return chairlift.model.slotsTaken > 0 && chairlift.model.nextCol > 40"


def take(page: Page, path: Path, theme: str, width: int, height: int) -> None:
    page.driver.set_window_size(width, height)
    page.run(
        "if (document.documentElement.dataset.theme !== arguments[0]) document.getElementById('theme').click()", theme
    )
    page.run("scrollTo(0, 0)")
    time.sleep(0.5)  # until the panels are redrawn
    save_small(page, path)


def save_small(page: Page, path: Path) -> None:
    """Save a picture of the page with few colours, which takes a third of the space and looks the same."""
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def main(folder: Path, model: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        served = Path(model) if model else write_tiny_checkpoint(Path(work) / "tiny", positions=1024)
        options = ["--max-batch-requests", "12", "--max-batch-tokens", "96"]
        if model:
            options += ["--served-model-name", served.name, "--kv-memory", "80MiB"]
        server = start_server(served, Path(work) / "log", *options)
        driver = start_browser()
        try:
            page = Page(driver)
            page.open(f"{server.url}/dashboard")
            page.wait_for("return document.documentElement.dataset.state === 'live' && chairlift.model.key !== null")
            page.burst("shared")
            page.find("#chat-input").send_keys("Why is the sky blue? Answer in two sentences.\n")
            page.wait_for("return !chairlift.chat.abort && chairlift.chat.talk.last.finish", seconds=120)
            page.find("#chat-input").send_keys("And at sunset?\n")
            page.click("[data-burst=mixed]")
            page.wait_for(BUSY)
            take(page, folder / "dashboard-light.png", "light", 1440, 1160)
            phone = {"width": 390, "height": 1180, "deviceScaleFactor": 1, "mobile": True}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
            take(page, folder / "dashboard-phone.png", "light", 1440, 1160)
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            page.run("chairlift.openStory([...chairlift.model.requests.values()].findLast((each) => each.outputs > 5))")
            take(page, folder / "dashboard-story-dark.png", "dark", 1440, 1160)
            page.click("#story-close")
            for policy in ("static", "continuous"):
                page.switch_policy(policy)
                page.burst("mixed")
            page.click("#lift-all")
            take(page, folder / "dashboard-policies.png", "light", 1440, 1160)
        finally:
            driver.quit()
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
