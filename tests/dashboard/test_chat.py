"""The chat of the dashboard in a real Chromium, with a server whose answers are given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.chatting import THINKING, chatting, open_chat, say
from tests.server.running_server import wait_for
from tests.tiny import CHATML

pytestmark = pytest.mark.slow  # a browser

ENTER, ESCAPE, TAB, UP, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue013", "\ue008"
HOSTILE = """<script>window.pwned = 1</script> <img src=x onerror="window.pwned = 2"> &lt;b&gt;
[run](javascript:window.pwned=3) [data](data:text/html,x) ![seen](https://evil.example/pixel.png) [ok](https://example.org/)

# A title

| a | b |
|---|---|
| <script> | `<i>` |

```html
</code></pre><script>window.pwned = 4</script> and a line that is much too long for the width of any small screen at all
```
"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def check_is_harmless(page: Any) -> None:
    assert page.run("return window.pwned ?? null") is None
    assert (
        page.run("return document.querySelectorAll('#chat-log :is(script, img, iframe, object, svg, style)').length")
        == 0
    )
    links = page.run("return [...document.querySelectorAll('#chat-log a')].map((each) => [each.protocol, each.rel])")
    assert links == [["https:", "noopener noreferrer nofollow"]] * 2
    text = page.text(".message.assistant .text")
    assert "<script>window.pwned = 1</script>" in text
    assert "[run](javascript:window.pwned=3)" in text
    assert "<b>" in text


def test_an_answer_is_shown_as_markdown_and_runs_nothing(browser: Any) -> None:
    with chatting(browser, HOSTILE) as (page, _, front):
        say(page, "Show me <b>all</b> of **Markdown**")
        check_is_harmless(page)
        assert page.text(".message.user .text") == "Show me <b>all</b> of **Markdown**"
        assert page.text("#chat-log h4") == "A title"
        assert page.run("return document.querySelectorAll('#chat-log td').length") == 2
        open_chat(page, front)  # again, from the storage
        check_is_harmless(page)
        assert page.problems() == []


def test_a_conversation_is_sent_as_a_whole_and_stays_over_a_reload(browser: Any) -> None:
    with chatting(browser, "One.", "Two.", "Three.") as (page, answers, front):
        page.click("#chat-options")
        page.find("#set-system").send_keys("Count.")
        say(page, "first")
        say(page, "second")
        assert all(
            part in answers.prompts[1] for part in ("system\nCount.", "user\nfirst", "assistant\nOne.", "user\nsecond")
        )
        open_chat(page, front)
        assert page.run("return [...document.querySelectorAll('.message .text')].map((each) => each.textContent)") == [
            *("first", "One.", "second", "Two."),
        ]
        say(page, "third")
        assert "assistant\nTwo." in answers.prompts[2]
        page.click("#chat-new")
        open_chat(page, front)
        assert page.run("return document.querySelectorAll('.message').length") == 0
        assert page.run("return document.getElementById('set-system').value") == "Count."


def test_the_chat_works_with_the_keyboard_alone(browser: Any) -> None:
    with chatting(browser, None, "Edited.", "Again.") as (page, answers, _):
        for _ in range(60):
            page.driver.switch_to.active_element.send_keys(TAB)
            if page.run("return document.activeElement.id") == "chat-input":
                break
        focused = page.driver.switch_to.active_element
        focused.send_keys("a line", SHIFT, ENTER, SHIFT, "and another", ENTER)
        page.wait_for("return document.querySelector('.message.assistant .text')?.textContent.includes('on and on')")
        assert page.run("return document.activeElement.id") == "chat-input"
        focused.send_keys(ESCAPE)
        page.wait_for("return !chairlift.chat.abort && chairlift.chat.talk.last.isStopped")
        page.wait_for("return document.getElementById('chat-status').textContent.includes('Stopped')")
        wait_for(lambda: bool(answers.cancelled), "the engine to be told")
        focused.send_keys(UP)  # edits the last message
        assert page.run("return document.activeElement.value") == "a line\nand another"
        focused.send_keys("!", ENTER)
        page.wait_for("return chairlift.chat.talk.last.content === 'Edited.'")
        assert "a line\nand another!" in answers.prompts[1]
        assert "on and on" not in answers.prompts[1]
        page.run("document.querySelector('.message.assistant footer button').focus()")
        page.driver.switch_to.active_element.send_keys(ENTER)  # retries
        page.wait_for("return chairlift.chat.talk.last.content === 'Again.'")
        assert answers.prompts[2] == answers.prompts[1]


def test_reasoning_and_tool_calls_are_shown_and_results_are_sent(browser: Any) -> None:
    thought = "<think>\nThe user wants weather.\n</think>\n" + CALL
    with chatting(browser, thought, "It rains.", template=CHATML + THINKING) as (page, answers, _):
        page.click("#chat-options")
        page.find("#set-tools").send_keys('[{"name": "get_weather", "parameters": {"type": "object"}}]')
        page.click("#chat-options")
        say(page, "weather?")
        thoughts = "document.querySelector('.assistant details.aside')"
        assert "The user wants weather." in page.run(f"return {thoughts}.textContent")
        assert not page.run(f"return {thoughts}.open")
        assert page.text(".calls summary") == "Calls get_weather"
        page.find(".results textarea").send_keys("rain, 11 °C")
        page.click(".results button")
        page.wait_for("return chairlift.chat.talk.last.content === 'It rains.'")
        assert "rain, 11 °C" in answers.prompts[1]
        assert "wants weather" not in answers.prompts[1]


def test_errors_are_shown_and_can_be_retried(browser: Any) -> None:
    with chatting(browser, "Fine.", sampling={"temperature": 0.7}) as (page, answers, _):
        page.click("#chat-options")
        assert page.find("#set-temperature").get_attribute("placeholder") == "0.7"
        page.find("#set-temperature").send_keys("-3")
        page.find("#set-tools").send_keys("{")
        say(page, "hello")
        assert "not valid JSON" in page.text(".assistant .problem")
        page.find("#set-tools").send_keys("\ue003")  # Backspace
        page.click(".message.assistant footer button")
        page.wait_for("return document.querySelector('.assistant .problem')?.textContent.includes('temperature')")
        page.click("#chat-reset")
        page.click(".message.assistant footer button")
        page.wait_for("return chairlift.chat.talk.last.content === 'Fine.'")
        assert len(answers.prompts) == 1
        assert all("400" in problem for problem in page.problems())


def test_a_model_without_a_chat_template_continues_a_text(browser: Any) -> None:
    with chatting(browser, " there was **a** lift", " and it moved", template=None) as (page, answers, _):
        assert not page.find("#set-system").is_displayed()
        say(page, "Once")
        assert page.text(".message.assistant .text") == " there was **a** lift"
        page.click(".message.assistant footer button:nth-of-type(2)")
        page.wait_for("return chairlift.chat.talk.messages.length === 4 && !chairlift.chat.abort")
        assert answers.prompts == ["Once", "Once there was **a** lift"]


def test_the_chat_fits_a_small_screen_in_both_themes(browser: Any) -> None:
    small = {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    with chatting(browser, HOSTILE) as (page, _, _):
        say(page, "Show me")
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", small)
        colours = []
        try:
            page.click("#chat-options")
            for _ in range(2):
                assert page.run("return document.documentElement.scrollWidth <= innerWidth")
                colours.append(
                    page.run(
                        "const { color, backgroundColor } = getComputedStyle(document.getElementById('chat'));"
                        "return [color, backgroundColor]"
                    )
                )
                page.click("#theme")
        finally:
            page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            page.run("localStorage.clear()")
        assert colours[0][0] != colours[1][0]
        assert colours[0][1] != colours[1][1]
