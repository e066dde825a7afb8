"""Structures: checks on creation, and waiting until the grammar is compiled."""

from __future__ import annotations

import msgspec
import pytest

from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.integrity import check_quiescent
from chairlift.core.request import Ending, FinishReason
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import MAX_STRUCTURE_LENGTH, Structure, StructureKind
from chairlift.core.scheduler.scheduler import WaitReason
from chairlift.errors import InvalidParameter
from tests.core.driving import events_of, make_request, make_scheduler, run_pipelined, run_to_end, shape, step

STRUCTURED = SamplingParams(max_tokens=4, structure=Structure.regex("a+"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a"),
        (StructureKind.REGEX, 5),
        (StructureKind.REGEX, ""),
        (StructureKind.JSON_OBJECT, "{}"),
        (StructureKind.GRAMMAR, "x" * (MAX_STRUCTURE_LENGTH + 1)),
    ],
)
def test_an_invalid_structure_is_refused_under_the_parameter_it_came_from(kind: StructureKind, text: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        Structure(kind, text, "response_format")
    assert refusal.value.parameter == "response_format"


def test_values_that_are_no_structure_or_no_json_are_refused() -> None:
    with pytest.raises(InvalidParameter) as refusal:
        SamplingParams(structure="a+")  # type: ignore[arg-type]
    assert refusal.value.parameter == "structure"
    loop: dict[str, object] = {}
    loop["loop"] = loop
    for schema in (loop, {"a": object()}):
        with pytest.raises(InvalidParameter):
            Structure.json(schema)


def test_the_parameter_name_is_not_compared_but_is_serialized() -> None:
    one, other = Structure.regex("a", "guided_regex"), Structure.regex("a", "structured_outputs")
    assert one == other
    assert hash(one) == hash(other)
    params = SamplingParams(structure=one)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert decoded.structure is not None
    assert decoded.structure.parameter == "guided_regex"
    refused = msgspec.msgpack.encode({"structure": {"kind": "regex", "text": ""}})
    with pytest.raises((InvalidParameter, msgspec.ValidationError)):
        msgspec.msgpack.decode(refused, type=SamplingParams)


def test_a_request_that_waits_for_its_grammar_takes_no_slot() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    scheduler.submit(make_request("structured", 3, params=STRUCTURED), 0)
    scheduler.submit(make_request("plain", 3, new=2), 0)
    assert shape(step(scheduler)) == [("plain", 0, 3)]
    assert scheduler.why_waiting("structured") is WaitReason.GRAMMAR
    scheduler.make_ready("structured")
    assert scheduler.why_waiting("structured") is not WaitReason.GRAMMAR
    run_to_end(scheduler)
    assert len(events_of(scheduler, RequestFinished)) == 2
    check_quiescent(scheduler)


def test_a_request_that_waits_for_its_grammar_can_be_cancelled_or_expire() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("cancelled", 3, params=STRUCTURED), 0)
    scheduler.submit(make_request("late", 3, params=STRUCTURED, deadline=5.0), 0)
    assert scheduler.finish("cancelled", Ending(FinishReason.CANCELLED), 1)
    assert not scheduler.schedule(4.0)
    assert not scheduler.schedule(5.0)
    endings = {event.request_id: event.ending.reason for event in events_of(scheduler, RequestFinished)}
    assert endings == {"cancelled": FinishReason.CANCELLED, "late": FinishReason.DEADLINE}
    check_quiescent(scheduler)
    scheduler.make_ready("late")  # compiled after the request ended


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_planned_ahead_wait_for_a_structured_requests_last_token(depth: int) -> None:
    plain, ahead = make_scheduler(), make_scheduler()
    for scheduler in (plain, ahead):
        for name in ("a", "b"):
            scheduler.submit(make_request(name, 5, params=STRUCTURED if name == "a" else None or SamplingParams()), 0)
        scheduler.make_ready("a")
    run_to_end(plain)
    run_pipelined(ahead, depth)
    tokens = [
        {name: [e.token for e in events if e.request_id == name] for name in ("a", "b")}  # type: ignore[union-attr]
        for events in (events_of(plain, TokenProduced), events_of(ahead, TokenProduced))
    ]
    assert tokens[0] == tokens[1]
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 5, params=STRUCTURED), 0)
    scheduler.make_ready("a")
    assert shape(scheduler.schedule(0)) == [("a", 0, 5)]
    assert not scheduler.schedule(0)
