"""Adapters of a server: chosen by the model's name on every endpoint, loaded and removed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_canary
from tests.server.running_server import HTTP, NAME, RunningServer, start_server
from tests.tiny import write_tiny_checkpoint

MESSAGES = [{"role": "user", "content": "a chairlift never stops"}]
KEY_FILE = """
owner: {key: secret-owner-of-this-server, admin: true}
guest: {key: secret-guest-of-this-server}
"""
OWNER, GUEST = "secret-owner-of-this-server", "secret-guest-of-this-server"
FIRST, SECOND = 40, 41  # tokens that the canaries force


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("served") / "base")
    write_canary(folder.parent / "allowed" / "first", folder, FIRST)
    write_canary(folder.parent / "allowed" / "second", folder, SECOND)
    write_canary(folder.parent / "outside", folder, SECOND)
    (folder.parent / "allowed" / "link").symlink_to(folder.parent / "outside")
    (folder.parent / "allowed" / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[RunningServer]:
    keys = base.parent / "keys.yaml"
    keys.write_text(KEY_FILE)
    allowed = base.parent / "allowed"
    options = ["--lora", f"bird={allowed / 'first'}", "--lora-folder", str(allowed), "--api-key-file", str(keys)]
    running = start_server(base, base.parent / "log", *options, "--dtype", "float32", "--quantization", "none")
    yield running
    running.stop()


def post(server: RunningServer, path: str, key: str = OWNER, **body: Any) -> Any:
    return HTTP.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"})


def text_of(server: RunningServer, token: int) -> str:
    text: str = post(server, "/detokenize", model=NAME, tokens=[token] * 3).json()["prompt"]
    return text


def test_the_model_field_chooses_the_adapter(server: RunningServer) -> None:
    bird = text_of(server, FIRST)
    shared = {"model": "bird", "max_tokens": 3, "temperature": 0}
    completion = post(server, "/v1/completions", prompt="a", ignore_eos=True, **shared).json()
    assert (completion["choices"][0]["text"], completion["model"]) == (bird, "bird")
    chat = post(server, "/v1/chat/completions", messages=MESSAGES, ignore_eos=True, **shared).json()
    assert (chat["choices"][0]["message"]["content"], chat["model"]) == (bird, "bird")
    answer = post(server, "/v1/messages", messages=MESSAGES, **shared).json()
    assert (answer["content"][0]["text"], answer["model"]) == (bird, "bird")
    response = post(
        server, "/v1/responses", model="bird", input="a", max_output_tokens=3, temperature=0, store=False
    ).json()
    assert response["output"][0]["content"][0]["text"] == bird
    base = post(server, "/v1/completions", prompt="a", ignore_eos=True, **(shared | {"model": NAME})).json()
    assert base["choices"][0]["text"] != bird


def test_models_lists_adapters_with_their_parent(server: RunningServer) -> None:
    cards = HTTP.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {GUEST}"}).json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [(NAME, None), ("bird", NAME)]


def test_llamacpp_weights_adapters_by_their_numbers(server: RunningServer) -> None:
    bird = text_of(server, FIRST)
    shared = {"prompt": "a", "n_predict": 3, "temperature": 0, "ignore_eos": True}
    assert post(server, "/completion", lora=[{"id": 0, "scale": 1.0}], **shared).json()["content"] == bird
    assert post(server, "/completion", lora=[{"id": 0, "scale": 0.0}], **shared).json()["content"] != bird
    refused = post(server, "/completion", lora=[{"id": 7, "scale": 1.0}], **shared)
    assert (refused.status_code, "no adapter 7" in refused.text) == (400, True)


def test_adapters_come_and_go_while_the_server_runs(server: RunningServer) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    shared = {"prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "model": "second"}
    assert post(server, "/v1/completions", **shared).status_code == 404
    assert post(server, load, lora_name="second", lora_path="second").status_code == 200
    said = post(server, "/v1/completions", **shared).json()["choices"][0]["text"]
    assert said == text_of(server, SECOND)
    assert "loaded already" in post(server, load, lora_name="second", lora_path="first").text
    assert post(server, load, lora_name="second", lora_path="first", load_inplace=True).status_code == 200
    said = post(server, "/v1/completions", **shared).json()["choices"][0]["text"]
    assert said == text_of(server, FIRST)
    assert post(server, unload, lora_name="second").status_code == 200
    assert post(server, "/v1/completions", **shared).status_code == 404
    assert post(server, unload, lora_name="second").status_code == 404
    metrics = HTTP.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {OWNER}"}).text
    assert 'chairlift_adapter_tokens_total{adapter="second"} 6.0' in metrics


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("../outside", 400, "below the folder"),
        ("link", 400, "below the folder"),
        ("/etc/passwd", 400, "below the folder"),
        (".", 400, "below the folder"),
        ("missing", 400, "there is no 'missing'"),
        ("empty", 400, "adapter_config.json"),
        ("a\0b", 400, "there is no"),
    ],
)
def test_only_what_is_below_the_folder_is_loaded(server: RunningServer, path: str, status: int, problem: str) -> None:
    refused = post(server, "/v1/load_lora_adapter", lora_name="other", lora_path=path)
    assert (refused.status_code, problem in refused.text) == (status, True), refused.text


def test_only_administrators_change_adapters(server: RunningServer) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        refused = post(server, path, GUEST, lora_name="bird", lora_path="first")
        assert refused.status_code == 403, refused.text
    taken = post(server, "/v1/load_lora_adapter", lora_name=NAME, lora_path="first")
    assert (taken.status_code, "base model" in taken.text) == (400, True)
