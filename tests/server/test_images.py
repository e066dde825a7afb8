"""Images in all APIs, sent by the real clients."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from PIL import Image

from chairlift import LLM, SamplingParams
from chairlift.server.served_model import ServedModel
from tests.server.running_server import NAME, RunningServer, start_server
from tests.vision.families import picture, write_checkpoint

QUESTION = "what is it?"
TOKENS = 8


def in_base64(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{in_base64(image)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tiny"
    write_checkpoint("qwen2_5_vl", folder)
    return folder


@pytest.fixture(scope="module")
def image_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(folder, tmp_path_factory.mktemp("image_server") / "log", "--dtype", "float32")
    yield running
    assert running.stop() == 0, running.tail()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The answers about two pictures, of the same engine without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", kv_memory="2MiB", threads=1, progress=False) as llm:
        parts = [[{"type": "image", "image": picture(seed)}, {"type": "text", "text": QUESTION}] for seed in (1, 2)]
        results = llm.chat([[{"role": "user", "content": each}] for each in parts], params, use_tqdm=False)
    texts = [result.outputs[0].text for result in results]
    assert texts[0] != texts[1]
    return texts


def test_openai_chat(image_server: RunningServer, expected: list[str]) -> None:
    for seed, text in zip((1, 2), expected, strict=True):
        content: Any = [
            {"type": "image_url", "image_url": {"url": url(picture(seed)), "detail": "low"}},
            {"type": "text", "text": QUESTION},
        ]
        answer = image_server.client().chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].message.content == text


def test_openai_responses(image_server: RunningServer, expected: list[str]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": url(picture(1)), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = image_server.client().responses.create(
        model=NAME,
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    assert answer.output_text == expected[0]


def test_anthropic(image_server: RunningServer, expected: list[str]) -> None:
    client = anthropic.Anthropic(base_url=image_server.url, api_key="none", max_retries=0, timeout=60)
    source: Any = {"type": "base64", "media_type": "image/png", "data": in_base64(picture(2))}
    answer = client.messages.create(
        model=NAME,
        messages=[
            {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}
        ],
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True, "temperature": 0},
    )
    assert "".join(block.text for block in answer.content if block.type == "text") == expected[1]


def test_ollama(image_server: RunningServer, expected: list[str]) -> None:
    options = {"temperature": 0, "num_predict": TOKENS, "ignore_eos": True}
    message = {"role": "user", "content": QUESTION, "images": [in_base64(picture(1))]}
    body = {"model": NAME, "messages": [message], "stream": False, "options": options}
    assert image_server.post("/api/chat", body).json()["message"]["content"] == expected[0]


@pytest.mark.slow
def test_langchain(image_server: RunningServer, expected: list[str]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain_openai.ChatOpenAI(
        model=NAME,
        base_url=f"{image_server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    parts = [
        {"type": "image", "base64": in_base64(picture(2)), "mime_type": "image/png"},
        {"type": "text", "text": QUESTION},
    ]
    assert model.invoke([messages.HumanMessage(content=parts)]).content == expected[1]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("data:image/png;base64,aGVsbG8=", "is no image"),
        ("data:,", "data URL"),
        ("http://127.0.0.1/a.png", "not fetched"),
        ("https://example.com/a.png", "not fetched"),
        ("file:///etc/passwd", "URL"),
    ],
)
def test_bad_images(image: str, says: str, image_server: RunningServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
    answer = image_server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


def test_videos_and_sound_are_refused(image_server: RunningServer) -> None:
    for part in ({"type": "video_url", "video_url": {"url": "a"}}, {"type": "input_audio", "input_audio": {}}):
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = image_server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert "not read" in answer.json()["error"]["message"]


def test_models_that_read_text_only(server: RunningServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": url(picture(1))}}]
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert "text only" in answer.json()["error"]["message"]


def test_images_in_what_is_embedded_are_refused(image_server: RunningServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": url(picture(1))}}]
    answer = image_server.post("/v1/embeddings", {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert "texts only" in answer.json()["error"]["message"]


def test_too_many_images(image_server: RunningServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": url(picture(1))}}] * 65
    answer = image_server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert "the limit is 64" in answer.json()["error"]["message"]


def test_bodies_that_may_have_images(folder: Path) -> None:
    model = ServedModel.load(folder, ["tiny"], {})
    assert model.images is not None
    for key in ("image", "images", "image_url", "input_image"):
        assert model.may_read_images(json.dumps({"a": [key]}).encode())
        assert not model.may_read_images(json.dumps({"a": f'say "{key}"'}).encode())
    assert not dataclasses.replace(model, images=None).may_read_images(b'"image"')
