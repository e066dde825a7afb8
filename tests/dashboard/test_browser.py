"""The page in a real Chromium, on a real server with a tiny model."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from tests.dashboard.pages import Page
from tests.server.running_server import NAME, RunningServer, start_server

pytestmark = pytest.mark.slow  # a browser, a server and pauses for animations

DONE = "return chairlift.model.requests.get(arguments[0])?.state === 'done'"
WAITED_FOR_SLOTS = """
    const waitedForSlots = (each) => each.waits.some((wait) => wait.reason === "slots");
    return [...chairlift.model.requests.values()].filter(waitedForSlots).length;
"""
OWN_COLOUR_ON_LIFT = """
    const own = getComputedStyle(document.documentElement).getPropertyValue('--own').trim();
    const wanted = own.slice(1).match(/../g).map((pair) => parseInt(pair, 16)).join();
    const canvas = document.getElementById('lift-canvas');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < data.length; at += 4) if (data.slice(at, at + 3).join() === wanted) return true;
    return false;
"""
BUBBLES = "return chairlift.model.slots.flat().filter((stay) => stay.idleFrom < stay.to && stay.to < Infinity).length"


def test_a_burst_fills_all_slots_and_frees_them(page: Page, lift_server: RunningServer) -> None:
    page.burst("mixed")
    assert page.run("return chairlift.model.slots.length") == 6  # all slots were used, and no more
    assert page.run("return chairlift.model.finished.length") == 24
    page.wait_for("return document.getElementById('tile-slots').textContent === '0 / 6'")
    assert page.run(WAITED_FOR_SLOTS) > 0
    for canvas in ("lift-canvas", "mask-canvas", "times-canvas", "blocks-canvas"):
        assert page.colours_of(canvas) > 3, canvas
    lift_server.wait_idle()


def test_the_page_shows_the_numbers_of_the_api(page: Page, lift_server: RunningServer) -> None:
    body = {
        "model": NAME,
        "prompt": "a chairlift never stops for boarding and neither does the engine",
        "max_tokens": 9,
    }
    lift_server.post("/v1/completions", body)
    answer = lift_server.post("/v1/completions", body | {"ignore_eos": True}).json()
    request_id, usage = f"{answer['id']}-0", answer["usage"]
    page.wait_for(DONE, request_id)
    page.run("chairlift.openStory(chairlift.model.requests.get(arguments[0]))", request_id)
    page.wait_for("return document.getElementById('story-output')")
    assert page.text("#story-prompt") == str(usage["prompt_tokens"])
    assert page.text("#story-outputs") == str(usage["completion_tokens"]) == "9"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert page.text("#story-cached").split()[0] == str(cached)
    assert page.run("return document.getElementById('story-output').textContent") == answer["choices"][0]["text"]
    assert page.text("#story-state") == "length"
    outcome = page.text("#story-events")
    assert all(event in outcome for event in ("queued", "admitted", "first token", "ends: length, 9 tokens"))
    for name, metric in {"prompt": "prompt_tokens_total", "output": "output_tokens_total", "steps": "steps_total",
                         "cached": "prompt_tokens_cached_total"}.items():  # fmt: skip
        value = lift_server.metric(f"chairlift_{metric}")
        page.wait_for(f"return Number(document.getElementById('total-{name}').dataset.value) === arguments[0]", value)
    page.click("#story-close")
    assert not page.find("#story").is_displayed()


def test_static_batches_have_bubbles_and_continuous_ones_have_none(page: Page) -> None:
    page.burst("mixed")
    assert page.run(BUBBLES) == 0
    page.switch_policy("static")
    page.burst("mixed")
    assert page.run(BUBBLES) > 0
    page.switch_policy("continuous")
    before = page.run(BUBBLES)
    page.burst("mixed")
    assert page.run(BUBBLES) == before


def test_a_shared_prefix_is_computed_once(page: Page) -> None:
    page.burst("shared")
    shared = page.run("return chairlift.model.tokens")
    assert shared["cached"] > shared["prompt"] / 2
    page.wait_for("return document.getElementById('prefix-rate').textContent !== '0%'")


def test_chat_streams_beside_the_picture_of_its_request(page: Page) -> None:
    page.find("#chat-input").send_keys("what is a chairlift\n")
    page.wait_for("return document.querySelector('.message.assistant .text')?.textContent.length > 0")
    page.click("#chat-stop")
    page.wait_for("return !chairlift.chat.abort && chairlift.chat.ownRequest?.end")
    page.wait_for("return /new, (stop|length|cancelled)/.test(document.getElementById('own-status').textContent)")
    page.wait_for("return !document.querySelector('.message.assistant footer button:last-child').hidden")
    page.wait_for(OWN_COLOUR_ON_LIFT)
    page.click("#chat-own")
    assert page.find("#story").is_displayed()
    page.click("#story-close")
    page.click("#chat-new")
    assert page.run("return document.querySelectorAll('.message').length") == 0


def test_few_used_blocks_of_a_large_pool_can_be_seen(page: Page) -> None:
    """The cells of a pool of which one block in a hundred is in use are as large as those of a small one."""
    sizes = page.run("""
        const { model } = chairlift, panel = chairlift.panels[2];
        const draw = (count, used) => {
          const blocks = used.flatMap((block) => [block, 1, 0]);
          model.blocks.reset({ num_blocks: count, block_size: 16, now: 0, blocks });
          panel.update();
          panel.layout(panel.canvas.clientWidth, parseFloat(panel.canvas.style.height));
          return [panel.size, panel.shown];
        };
        chairlift.isLive = false;
        const used = Array.from({ length: 200 }, (_, index) => index);
        const found = [draw(256, used), draw(20000, used), draw(20000, used.map((block) => block * 100))];
        chairlift.isLive = true;
        return found;
    """)
    assert sizes[0] == sizes[1]
    assert sizes[1][1] == 50
    assert sizes[2][0] >= 6
    assert sizes[2][1] == 200


def test_the_page_works_with_the_keyboard(page: Page) -> None:
    page.burst("mixed")
    page.run("document.getElementById('lift-canvas').focus()")
    canvas = page.find("#lift-canvas")
    canvas.send_keys("\ue012" * 3)  # arrow left
    assert page.run("return chairlift.cursor") is not None
    page.wait_for("return document.getElementById('step-which').textContent.indexOf('last') < 0")
    for _ in range(60):  # to a step with a request in the first slot
        if page.run("return chairlift.lift.requestAt(0, chairlift.cursor) !== null"):
            break
        canvas.send_keys("\ue012")
    canvas.send_keys("\ue007")  # Enter
    page.wait_for("return !document.getElementById('story').hidden")
    page.find("#story-close").send_keys("\ue00c")  # Escape
    assert not page.find("#story").is_displayed()
    assert page.run("return document.activeElement.id") == "lift-canvas"
    canvas.send_keys("\ue010")  # End
    assert page.run("return chairlift.cursor") is None


def test_every_control_has_an_accessible_name(page: Page) -> None:
    nameless = """
        const named = (node) => node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length;
        return [...document.querySelectorAll("button, input, select, canvas, section, [role=dialog]")]
          .filter((node) => !named(node) && !node.getAttribute("aria-labelledby")).map((node) => node.outerHTML);
    """
    assert page.run(nameless) == []


def test_themes_and_small_screens(page: Page) -> None:
    background = "return getComputedStyle(document.documentElement).backgroundColor"
    dark_system = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark_system)
    page.wait_for("return document.documentElement.dataset.theme === 'dark'")
    dark = page.run(background)
    page.click("#theme")
    assert page.run("return document.documentElement.dataset.theme") == "light"
    assert page.run(background) != dark
    page.run("localStorage.clear()")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.burst("mixed")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        small = "button:not([hidden]):not(.link), #chat-input"
        sizes = page.run(f"return [...document.querySelectorAll('{small}')].filter((each) => each.offsetParent)"
                         ".map((each) => each.offsetHeight)")  # fmt: skip
        assert min(sizes) >= 36  # large enough for touch
        assert page.colours_of("lift-canvas") > 3
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_saved_run_opens_and_plays(page: Page, tmp_path: Path) -> None:
    page.burst("mixed")
    steps = page.run("return chairlift.model.nextCol")
    saved = page.driver.execute_async_script(
        "const done = arguments[0];"
        "chairlift.run.file().then(async (blob) => { const bytes = new Uint8Array(await blob.arrayBuffer());"
        " done(btoa(String.fromCharCode(...bytes))); })"
    )
    file = tmp_path / "run.lift"
    file.write_bytes(base64.b64decode(saved))
    assert file.stat().st_size < 100_000
    page.find("#open-file").send_keys(str(file))
    page.wait_for("return document.documentElement.dataset.state === 'replay'")
    page.run("chairlift.replay.seek(chairlift.replay.last)")
    assert page.run("return chairlift.model.nextCol") == steps
    page.run("chairlift.replay.seek(chairlift.replay.first)")
    assert page.run("return chairlift.model.nextCol") < steps
    page.run("chairlift.replay.speed = 50; chairlift.replay.play(true)")
    page.wait_for("return chairlift.model.nextCol === arguments[0]", steps)
    assert not page.find("[data-burst=mixed]").is_enabled()
    page.click("#replay-close")
    page.wait_for("return document.documentElement.dataset.state === 'live'")


def test_a_file_that_is_not_a_run_is_refused(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "other.lift"
    file.write_text('{"t": "hello"}\n')
    page.find("#open-file").send_keys(str(file))
    page.wait_for("return document.getElementById('message').textContent.includes('not a recorded run')")
    assert page.run("return document.documentElement.dataset.state") == "live"


def test_a_recorded_page_needs_no_server(browser: Any, lift_server: RunningServer, tmp_path: Path) -> None:
    page, over = Page(browser), threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            lift_server.post("/v1/completions", {"model": NAME, "prompt": ["a lift", "and on"], "max_tokens": 9})

    out = tmp_path / "run.html"
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_busy)
        done = CliRunner().invoke(app, ["record", str(out), "--url", lift_server.url, "--seconds", "1"])
        over.set()
        busy.result()
    assert done.exit_code == 0, done.output
    page.open(out.as_uri())
    page.wait_for("return document.documentElement.dataset.state === 'replay'")
    page.run("chairlift.replay.seek(chairlift.replay.last)")
    page.wait_for("return chairlift.model.nextCol > 0")
    page.wait_for("return document.getElementById('lift-empty').hidden")
    assert page.colours_of("lift-canvas") > 3
    assert page.problems() == []


def test_the_page_prompts_for_the_api_key(browser: Any, tiny_folder: Path, tmp_path: Path) -> None:
    server = start_server(tiny_folder, tmp_path / "log", "--api-key", "sesame")
    try:
        page = Page(browser)
        page.open(f"{server.url}/dashboard")
        page.wait_for("return document.documentElement.dataset.state === 'key'")
        assert page.run("return chairlift.model.key") is None
        page.find("#key-input").send_keys("wrong\n")
        page.wait_for("return !chairlift.connection.isRunning && document.documentElement.dataset.state === 'key'")
        page.find("#key-input").clear()
        page.find("#key-input").send_keys("sesame\n")
        page.wait_for("return document.documentElement.dataset.state === 'live' && chairlift.model.key !== null")
        assert page.run("return chairlift.model.hello.policy_switch") is False
        page.wait_for("return document.getElementById('policy-status').textContent.includes('--policy-switch')")
        assert all("401" in problem for problem in page.problems())
    finally:
        server.stop()
