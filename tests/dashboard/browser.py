"""A real browser."""

from __future__ import annotations

from typing import Any

from tests.tools import missing, require_tool


def start_browser() -> Any:
    try:
        from selenium import webdriver
    except ImportError:
        missing("needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = require_tool("chromium", "chromium-browser", "google-chrome")
    driver = require_tool("chromedriver")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument("--window-size=1440,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
