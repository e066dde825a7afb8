"""The dashboard page in a browser."""

from __future__ import annotations

import time
from typing import Any


class Page:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.problems()  # discard those of the page before
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, *arguments: Any, seconds: float = 30) -> Any:
        """Wait until the script returns a true value, and return it."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"waited {seconds} s for {script}; the page reports {self.problems()}"
            time.sleep(0.05)
        return found

    def find(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def click(self, css: str) -> None:
        self.find(css).click()

    def text(self, css: str) -> str:
        return str(self.find(css).text)

    def problems(self) -> list[str]:
        """Return the warnings and errors on the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def burst(self, kind: str) -> None:
        """Send a burst of requests and wait until all are answered."""
        self.click(f"[data-burst={kind}]")
        self.wait_for("return /^(\\d+) of \\1 answered/.test(document.getElementById('burst-status').textContent)")
        self.wait_for("return chairlift.model.slotsTaken === 0 && !chairlift.model.waiting.length")

    def switch_policy(self, name: str) -> None:
        self.run("arguments[0].click()", self.find(f"[name=policy][value={name}]"))
        self.wait_for("return chairlift.model.policy === arguments[0]", name)

    def colours_of(self, canvas: str) -> int:
        """Return the number of colours on a canvas; an empty canvas has one."""
        script = """
            const canvas = document.getElementById(arguments[0]);
            const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(image.data.buffer)).size;
        """
        return int(self.run(script, canvas))
