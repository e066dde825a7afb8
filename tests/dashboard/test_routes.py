"""The dashboard's routes and subscribers, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from chairlift.server.access import KeySources, KeyTable
from chairlift.server.http.dashboard import (
    MAX_FRAMES,
    MAX_SUBSCRIBERS,
    MAX_SUBSCRIBERS_OF_KEY,
    MAX_UNREAD,
    MAX_UNREAD_BYTES,
    RecentFrames,
    Subscriber,
)
from chairlift.server.wire.messages import DashboardFrame, RecorderFault, RecordSteps, SwitchPolicy, Update
from tests.dashboard.frames import deliver, frame, headers, next_frame, open_page, send_frames
from tests.server.front_end import LOADED, front_end
from tests.server.running_server import HTTP, wait_for

KEYS = {"api_keys": ["alice one", "bob two"]}


def test_the_page_needs_no_key_but_its_data_does() -> None:
    with front_end(send_frames, **KEYS) as front:
        page = HTTP.get(f"{front.url}/dashboard")
        assert page.status_code == 200
        assert "<title>Chairlift</title>" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for key in (None, "wrong"):
            for method, path in (("GET", "stream"), ("GET", "requests/x"), ("POST", "policy")):
                answer = HTTP.request(method, f"{front.url}/dashboard/{path}", headers=headers(key))
                assert answer.status_code == 401, path


def test_no_dashboard_removes_the_routes() -> None:
    with front_end(dashboard=False) as front:
        assert HTTP.get(f"{front.url}/dashboard").status_code == 404
        assert HTTP.get(f"{front.url}/dashboard/stream").status_code == 404


def test_a_page_gets_a_greeting_a_keyframe_and_later_frames() -> None:
    with front_end(send_frames) as front, open_page(front) as frames:
        hello = next(frames)
        assert (hello["t"], hello["model"], hello["has_chat"]) == ("hello", "scripted", True)
        assert next_frame(frames, "tenants")["names"] == {"0": "alice", "1": "bob"}
        assert next(frames)["t"] == "key"
        deliver(front.engine, frame(1), frame(2))
        assert [next_frame(frames, "batch")["n"] for _ in range(2)] == [1, 2]


def test_the_service_frame_has_the_same_numbers_as_metrics() -> None:
    with front_end(send_frames) as front, open_page(front) as frames:
        answer = HTTP.post(
            f"{front.url}/v1/completions", json={"model": "scripted", "prompt": "the lift", "max_tokens": 2}
        )
        used = answer.json()["usage"]
        while (service := next_frame(frames, "service")["metrics"]).get("output_tokens_total") != 2:
            pass
        assert service["prompt_tokens_total"] == used["prompt_tokens"]
        assert service["requests_total length"] == front.metric("requests_total", reason="length") == 1


def test_nothing_is_recorded_without_an_open_page() -> None:
    with front_end(send_frames) as front:
        HTTP.post(f"{front.url}/v1/completions", json={"model": "scripted", "prompt": "the lift", "max_tokens": 2})
        assert not any(isinstance(message, RecordSteps) for message in front.engine.received)
        with open_page(front) as frames:
            next_frame(frames, "key")
        watches = [message for message in front.engine.received if isinstance(message, RecordSteps)]
        assert watches[0].keyframe
        wait_for(lambda: not front.service.subscribers.texts.is_watched, "the page to be forgotten")


def test_a_text_is_shown_to_the_key_it_was_sent_with_and_to_no_other() -> None:
    with front_end(send_frames, **KEYS) as front, open_page(front, "one") as frames:
        next_frame(frames, "key")
        body = {"model": "scripted", "prompt": "the lift", "max_tokens": 2}
        answer = HTTP.post(f"{front.url}/v1/completions", json=body, headers=headers("one"))
        address = f"{front.url}/dashboard/requests/{answer.json()['id']}-0"
        own = HTTP.get(address, headers=headers("one"))
        assert own.json() == {"prompt": "the lift", "prompt_is_whole": True, "output": "ok", "output_is_whole": True}
        assert HTTP.get(address, headers=headers("two")).status_code == 404


def test_only_administrators_see_what_concerns_all_keys_if_these_are_isolated() -> None:
    data = ("GET", "/metrics"), ("GET", "/dashboard/stream"), ("POST", "/dashboard/policy")
    options = {"isolate_keys": True, "policy_switch": True}
    keys = KeySources(["alice one", "bob two"]).read()
    admin = replace(KeySources(["root three"]).read()[0], is_admin=True)
    with front_end(send_frames, service_options=options, keys=KeyTable([*keys, admin])) as front:
        body = {"model": "scripted", "prompt": "the lift", "max_tokens": 2}
        assert HTTP.post(f"{front.url}/v1/completions", json=body, headers=headers("one")).status_code == 200
        for method, path in data:
            refused = HTTP.request(method, front.url + path, json={"policy": "static"}, headers=headers("one"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed"), path
            assert "bob" not in refused.text
        with open_page(front, "three") as frames:
            assert next_frame(frames, "tenants")["names"] == {"0": "alice", "1": "bob"}
        assert HTTP.get(f"{front.url}/metrics", headers=headers("three")).status_code == 200
        policy = {"policy": "static"}
        assert HTTP.post(f"{front.url}/dashboard/policy", json=policy, headers=headers("three")).status_code == 200
    with front_end(send_frames, service_options=options, keys=KeyTable(keys), public_metrics=True) as front:
        assert HTTP.get(f"{front.url}/metrics").status_code == 200
    with front_end(send_frames, keys=KeyTable(keys)) as front:  # keys that are not isolated see all, as ever
        assert HTTP.get(f"{front.url}/metrics", headers=headers("one")).status_code == 200


def test_the_policy_switch_needs_permission_and_a_valid_policy() -> None:
    with front_end(send_frames) as front:
        refused = HTTP.post(f"{front.url}/dashboard/policy", json={"policy": "static"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    with front_end(send_frames, service_options={"policy_switch": True}) as front:
        for body in (
            {"policy": "lunar"},
            {"policy": "continuous", "max_delay_ms": 5},
            {},
        ):
            assert HTTP.post(f"{front.url}/dashboard/policy", json=body).status_code == 400
        answer = HTTP.post(f"{front.url}/dashboard/policy", json={"policy": "static", "max_delay_ms": 5})
        assert answer.json() == {"policy": "static"}
        assert [message for message in front.engine.received if isinstance(message, SwitchPolicy)] == [
            SwitchPolicy("static", 5.0)
        ]


def test_the_number_of_pages_is_limited() -> None:
    with front_end(send_frames) as front:
        subscribers = front.service.subscribers
        admitted = [subscribers.subscribe(None, None) for _ in range(MAX_SUBSCRIBERS)]
        refused = HTTP.get(f"{front.url}/dashboard/stream")
        assert refused.status_code == 429
        assert "close one" in refused.json()["error"]["message"]
        subscribers.unsubscribe(admitted[0])
        with open_page(front) as frames:
            next_frame(frames, "key")


def test_the_pages_of_a_key_are_limited() -> None:
    with front_end(send_frames, **KEYS) as front:
        for _ in range(MAX_SUBSCRIBERS_OF_KEY):
            front.service.subscribers.subscribe(b"digest", "alice")
            front.service.subscribers.subscribe(b"proxy", "")  # an ingress, which counts the pages of keys itself
        front.service.subscribers.subscribe(b"proxy", "")
        assert HTTP.get(f"{front.url}/dashboard/stream", headers=headers("one")).status_code == 429
        with open_page(front, "two") as frames:
            next_frame(frames, "key")


def test_a_slow_page_loses_frames_and_continues_from_a_keyframe() -> None:
    async def scenario() -> None:
        subscriber = Subscriber(None, None)
        subscriber.offer(frame(0))  # frames before its first keyframe do not count as lost
        assert (subscriber.take_unread(), subscriber.num_lost) == ([], 0)
        subscriber.offer(frame(1, is_key=True))
        for number in range(MAX_UNREAD + 20):
            subscriber.offer(frame(number))
        assert subscriber.take_unread() == []
        assert not subscriber.synced
        assert subscriber.num_lost == MAX_UNREAD + 21
        subscriber.offer(frame(2, is_key=True))
        subscriber.offer(frame(3))
        result = [json.loads(data) for data in subscriber.take_unread()]
        assert [one["t"] for one in result] == ["lost", "key", "batch"]
        assert result[0]["frames"] == MAX_UNREAD + 21

    asyncio.run(scenario())


def test_repeated_frames_never_exceed_the_unread_limit() -> None:
    recent = RecentFrames()
    recent.add(DashboardFrame(b"k" * (MAX_UNREAD_BYTES + 1), True, {0: "alice"}))
    for number in range(1, MAX_FRAMES):
        recent.add(frame(number, tenants={number: "bob"}))
    assert len(recent.all()) == MAX_FRAMES

    async def scenario() -> None:
        subscriber = Subscriber(None, None)
        subscriber.catch_up(recent.all())
        for number in range(MAX_FRAMES):  # before it reads any of them
            subscriber.offer(frame(number, tenants={number: "carol"}))
        assert (subscriber.synced, subscriber.num_lost) == (True, 0)
        assert len(subscriber.take_unread()) == 4 * MAX_FRAMES

    asyncio.run(scenario())


def test_texts_are_bounded_and_dropped_with_the_last_page() -> None:
    with front_end(send_frames) as front:
        texts = front.service.subscribers.texts
        subscriber = front.service.subscribers.subscribe(None, None)
        for number in range(600):
            texts.open([f"r{number}"], list(range(3, 1003)), None)
        texts.add(Update("r599", text="x" * 9000))
        texts.add(Update("r599", text="y" * 9000))
        assert texts.find("r0", None) is None
        found = texts.find("r599", None)
        assert found is not None
        assert (len(str(found["output"])), found["output_is_whole"], found["prompt_is_whole"]) == (4000, False, False)
        front.service.subscribers.unsubscribe(subscriber)
        assert texts.find("r599", None) is None


def test_shutdown_ends_the_pages() -> None:
    with front_end(send_frames) as front, open_page(front) as frames:
        next_frame(frames, "key")
        front.engine.loop.call_soon_threadsafe(front.service.subscribers.close)
        assert all(one["t"] in ("service", "lost") for one in frames)  # the stream ends


def test_a_recorder_that_is_off_is_shown_and_not_used_until_the_engine_restarts() -> None:
    with front_end(send_frames) as front:
        subscribers, engine = front.service.subscribers, front.engine
        engine.loop.call_soon_threadsafe(subscribers.receive, RecorderFault(is_off=True))
        with open_page(front) as frames:
            service = next_frame(frames, "service")
            assert service["recorder_off"]
            assert service["metrics"]["dashboard_faults_total"] == 1
            next_frame(frames, "service")
        assert not any(isinstance(message, RecordSteps) and message.keyframe for message in engine.received)
        engine.loaded = msgspec.structs.replace(LOADED)
        with open_page(front) as frames:
            next_frame(frames, "key")


def test_a_frame_that_cannot_be_delivered_affects_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("cannot")

    with front_end(send_frames) as front, open_page(front) as frames:
        next_frame(frames, "key")
        with monkeypatch.context() as patch:
            patch.setattr(Subscriber, "offer", fail)
            deliver(front.engine, frame(1))
            body = {"model": "scripted", "prompt": "the lift", "max_tokens": 2}
            assert HTTP.post(f"{front.url}/v1/completions", json=body).status_code == 200
        assert next_frame(frames, "key")["n"] == 0  # continues from the next keyframe


def test_reopened_pages_need_no_new_keyframes() -> None:
    with front_end(send_frames) as front, open_page(front) as frames:
        next_frame(frames, "key")
        deliver(front.engine, frame(1), frame(2))
        next_frame(frames, "batch")
        for _ in range(5):
            with open_page(front) as others:
                assert next_frame(others, "key")["n"] == 0
                assert [next_frame(others, "batch")["n"] for _ in range(2)] == [1, 2]
        keys = [message for message in front.engine.received if isinstance(message, RecordSteps) and message.keyframe]
        assert len(keys) == 1
        deliver(front.engine, *(frame(number) for number in range(MAX_FRAMES)))
        with open_page(front) as others:  # too many frames to repeat
            next_frame(others, "key")
        keys = [message for message in front.engine.received if isinstance(message, RecordSteps) and message.keyframe]
        assert len(keys) == 2


def test_frames_of_a_dead_engine_are_not_repeated() -> None:
    with front_end(send_frames) as front:
        with open_page(front) as frames:
            next_frame(frames, "key")
        front.engine.loaded = msgspec.structs.replace(LOADED)
        with open_page(front) as frames:
            next_frame(frames, "key")
        keys = [message for message in front.engine.received if isinstance(message, RecordSteps) and message.keyframe]
        assert len(keys) == 2
