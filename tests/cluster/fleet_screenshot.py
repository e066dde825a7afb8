"""Takes docs/images/dashboard-fleet.png from a real fleet: `python -m tests.cluster.fleet_screenshot FILE [MODEL]`."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.cluster.running_fleet import start_fleet
from tests.dashboard.browser import start_browser
from tests.dashboard.pages import Page
from tests.dashboard.screenshots import save_small
from tests.server.running_server import NAME
from tests.tiny import write_tiny_checkpoint

LOADED = "return chairlift.lifts.size === 2 && [...chairlift.lifts.values()].every((lift) => lift.model.nextCol > 60)"


def main(file: Path, model: str | None) -> None:
    with tempfile.TemporaryDirectory() as work:
        served = Path(model) if model else write_tiny_checkpoint(Path(work) / "tiny", positions=4096)
        options = [
            "--max-batch-requests",
            "12",
            "--max-batch-tokens",
            "96",
            *(["--kv-memory", "80MiB"] if model else []),
        ]
        fleet = start_fleet(served, Path(work) / "log", *options)
        driver = start_browser()
        done = threading.Event()

        def converse(group: int) -> None:
            """Send prompts that begin like those of the same group."""
            turn = 0
            while not done.is_set():
                turn += 1
                prompt = f"conversation {group} " * 30 + f"turn {turn}"
                body = {"model": NAME, "prompt": prompt, "max_tokens": 40 + 10 * group, "ignore_eos": True}
                fleet.post("/v1/completions", body)

        threads = [threading.Thread(target=converse, args=(group,)) for group in range(10)]
        try:
            fleet.wait_for_replicas(2)
            page = Page(driver)
            page.open(f"{fleet.url}/dashboard")
            for thread in threads:
                thread.start()
            page.wait_for(LOADED, seconds=120)
            time.sleep(6)  # until the rates are known
            page.find("#chat-input").send_keys("Why is the sky blue?\n")
            driver.set_window_size(1440, 800)
            page.run("scrollTo(0, 0)")
            time.sleep(3)
            save_small(page, file)
            print(driver.get_log("browser"))
        finally:
            done.set()
            for thread in threads:
                if thread.ident:
                    thread.join()
            driver.quit()
            fleet.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
