"""A server whose engine answers with given texts, for the chat of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chairlift.core.request import RequestLimits
from chairlift.server.wire.messages import Cancel, Loaded, Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.dashboard.pages import Page
from tests.server.front_end import FrontEnd, ScriptedEngine, front_end
from tests.tiny import CHATML, byte_level_tokenizer

LOADED = Loaded(RequestLimits(vocab_size=320, max_model_len=8192), max_batch_requests=8)
PIECE = 7  # characters of an update
THINKING = "{# <think> enable_thinking </think> #}"


class Answers:
    """The engine's script: each request gets the next of `texts`; an answer of None goes on until it is cancelled."""

    def __init__(self, *texts: str | None) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []
        self.cancelled: list[str] = []
        self._tokenizer = byte_level_tokenizer()

    def __call__(self, engine: ScriptedEngine, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            self.cancelled += message.request_ids
        if not isinstance(message, Submit):
            return
        self.prompts.append(self._tokenizer.decode(list(message.prompt), skip_special_tokens=False))
        text = self.texts.pop(0)
        whole = text or "It goes on and on. "
        for begin in range(0, len(whole), PIECE):
            piece = whole[begin : begin + PIECE]
            is_last = text is not None and begin + PIECE >= len(whole)
            reason = "stop" if is_last else None
            engine.publish(Update(message.request_id, text=piece, tokens=[5], cached_tokens=0, finish_reason=reason))


@contextmanager
def chatting(
    browser: Any, *texts: str | None, template: str | None = CHATML, **options: Any
) -> Iterator[tuple[Page, Answers, FrontEnd]]:
    """Open the dashboard of a server that answers with these texts."""
    answers, page = Answers(*texts), Page(browser)
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=template)
    with front_end(answers, tokenizer=tokenizer, loaded=LOADED, **options) as front:
        try:
            open_chat(page, front)
            yield page, answers, front
        finally:
            browser.get("about:blank")  # An open stream would keep the server from stopping.


def open_chat(page: Page, front: FrontEnd) -> None:
    page.open(f"{front.url}/dashboard")
    page.wait_for("return Boolean(window.chairlift?.chat.hello) && !document.getElementById('chat-input').disabled")


def say(page: Page, text: str) -> None:
    """Send a message and wait for the answer."""
    page.find("#chat-input").send_keys(text + "\n")
    page.wait_for("return !chairlift.chat.abort && chairlift.chat.talk.last?.role === 'assistant'")
