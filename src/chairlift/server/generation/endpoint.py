"""The interface of the generation endpoints: request bodies, requests, and builders of their responses."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.targets import Targets
from chairlift.errors import InvalidParameter
from chairlift.server.generation.usage import Usage
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import ImageInput, Update
from chairlift.server.wire.unknown_fields import check_unknown
from chairlift.text.reasoning import ReasoningUse

MAX_PARAMETERS = 256
MAX_PATH = 300  # characters of a field's path in an error

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # 64-bit integers, which messages to the engine can encode
Entry = TypeVar("Entry")
# A list whose first invalid entry is its only error: to format those of half a million entries takes seconds.
Entries = Annotated[list[Entry], Field(fail_fast=True)]

# OpenAI's codes by pydantic's kinds of errors.
_CODES = {"missing": "missing_required_parameter", "union_tag_not_found": "missing_required_parameter"}


def max_entries(limit: int) -> BeforeValidator:
    """Limit the entries of an object before validation: its errors have no `Entries`."""
    return BeforeValidator(lambda data: _check_count(data, limit, "entries"))


def _check_count(data: Any, limit: int, what: str) -> Any:
    if isinstance(data, dict) and len(data) > limit:
        raise ValueError(f"has {len(data)} {what}; the limit is {limit}")
    return data


def invalid_field(errors: Sequence[Mapping[str, Any]], data: Any) -> InvalidParameter:
    """Convert pydantic's errors about the first invalid field of `data`. The name is the path of the field, such as
    `stop[2]` or `response_format.json_schema.name`; an error of the whole body has no name."""

    def resemblance(error: Mapping[str, Any]) -> tuple[bool, int]:
        return _code(error["type"]) != "invalid_type", len(list(_steps_in_data(error["loc"], data)))

    # The error of the alternative that the value resembles most: of the right type, or wrong deep inside.
    error = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=resemblance)
    if isinstance(refusal := error.get("ctx", {}).get("error"), InvalidParameter):
        return refusal
    kind, steps = error["type"], list(_steps_in_data(error["loc"], data))
    if kind == "missing" and error["loc"]:  # otherwise the whole body is missing
        steps.append(error["loc"][-1])
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        steps.append(error["ctx"]["discriminator"].strip("'"))
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return InvalidParameter(path[1:][:MAX_PATH], str(error["msg"]), _code(kind))


def _steps_in_data(location: Sequence[int | str], data: Any) -> Iterator[int | str]:
    """Follow a location, leaving out the steps that name alternatives of a union."""
    for step in location:
        is_index = isinstance(step, int) and isinstance(data, list) and step < len(data)
        if is_index or (isinstance(data, dict) and step in data):
            data = data[step]
            yield step


def _code(kind: str) -> str:
    if kind.endswith(("_type", "_parsing")):
        return "invalid_type"
    return _CODES.get(kind, "invalid_value")


class StrictModel(BaseModel):
    """A model without type coercion ("3" is not 3). What else it is given is kept until `check_unknown_fields`."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return handler(_check_count(data, MAX_PARAMETERS, "parameters"))

    @classmethod
    def known_fields(cls) -> Collection[str]:
        """The names of all fields as a client writes them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    def check_unknown_fields(self, location: str) -> None:
        """Apply the rule for unknown fields to this object at `location` and to all objects in it."""
        if self.__pydantic_extra__:
            self.take_extras(self.__pydantic_extra__)
            self.check_unknown_names(location, self.__pydantic_extra__)
            self.__pydantic_extra__.clear()
        for name in self.model_fields_set & type(self).model_fields.keys():
            field = type(self).model_fields[name].alias or name
            _check_value(f"{location}.{field}" if location else field, getattr(self, name))

    def take_extras(self, extras: dict[str, Any]) -> None:
        """Remove the parameters that are no fields of the class but known nevertheless."""

    def check_unknown_names(self, location: str, given: Mapping[str, Any]) -> None:
        check_unknown(location, given, self.known_fields())


def _check_value(location: str, value: Any) -> None:
    if isinstance(value, StrictModel):
        value.check_unknown_fields(location)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, StrictModel):
                item.check_unknown_fields(f"{location}[{index}]")


class RequestBody(StrictModel):
    """The whole body of a request."""

    # Parameters of other endpoints that would change the answer here; they are refused.
    refused_names: ClassVar[Collection[str]] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(_check_count(data, MAX_PARAMETERS, "parameters"))
        body.check_unknown_fields("")
        return body

    def check_unknown_names(self, location: str, given: Mapping[str, Any]) -> None:
        for name in self.refused_names:
            if given.get(name) is not None:
                problem = "unknown parameter: it belongs to another endpoint, and would change the answer"
                raise InvalidParameter(name, problem, "unknown_parameter")
        super().check_unknown_names(location, given)


Model = TypeVar("Model", bound=StrictModel)


def parse_at(location: str, model: type[Model], given: Any) -> Model:
    """Validate a part of a body; errors name the field below `location`, which is empty for the whole body."""
    try:
        part = model.model_validate(given)
    except ValidationError as error:
        field = invalid_field(error.errors(include_url=False), given)
        raise field.renamed(".".join(filter(None, (location, field.parameter)))) from error
    part.check_unknown_fields(location)
    return part


def renamed_parameter(parameter: str, names: Mapping[str, str]) -> str:
    """Translate a parameter's name; `names` maps patterns of its beginning to what replaces them."""
    for pattern, name in names.items():
        renamed, found = re.subn(rf"^(?:{pattern})(?![a-z_])", name, parameter)
        if found:
            return renamed
    return parameter


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LatencyTargets(StrictModel):
    """What the client expects of a request, in milliseconds."""

    ttft_ms: Milliseconds | None = None  # Until the first token.
    tpot_ms: Milliseconds | None = None  # For each token after it.
    e2e_ms: Milliseconds | None = None  # Until the end of the answer.

    @property
    def targets(self) -> Targets:
        return Targets.of_milliseconds(self.model_dump(exclude_none=True))


Tier = Annotated[str | None, Field(max_length=64)]


class EngineBody(RequestBody):
    """Parameters of every endpoint that uses the engine."""

    model: str | None = None  # the served one
    timeout: float | None = None
    cache_salt: Annotated[str | None, Field(max_length=256)] = None
    priority: Integer | None = None
    targets: LatencyTargets | None = None
    # Does not change the output; with fair scheduling it is the tenant.
    user: Annotated[str | None, Field(max_length=256)] = None
    service_tier: Tier = None  # Once it is parsed, the class that the request has, for its response.

    def lora_weights(self, model: ServedModel) -> dict[str, float] | None:
        """The adapters of the request with their weights; None for the base model."""
        return model.adapters.chosen(self.model)


# A comment, which clients ignore, so that proxies do not close a connection without traffic.
PING = b": waiting\n\n"


class ResponseBuilder(Protocol):
    """Builds the response to one HTTP request from the engine's updates, whole or as a stream of events."""

    usage: Usage
    media_type: str = "text/event-stream"  # A stream's; STREAM_ENDS has the ends of its events.

    def add(self, update: Update) -> None:
        """Add an update to the whole response."""

    def body(self) -> Any:
        """Return the whole response, as JSON values."""

    def events(self, update: Update) -> Iterable[bytes]:
        """Return the stream's events for an update."""

    def end_events(self) -> Iterable[bytes]:
        """Return the events that end a complete stream."""

    def error_events(self, error: APIError) -> Iterable[bytes]:
        """Return the events that end a failed stream."""

    def ping(self) -> bytes:
        """Return what a stream sends while it has nothing to say."""
        return PING


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The prompts of a request with their final parameters, and the format of the reply."""

    prompts: list[list[int]]
    params: SamplingParams
    # Makes the builder of the response, of the response's id, the ids of all completions and their usage.
    reply: Callable[[str, list[str], Usage], ResponseBuilder]
    reasoning: ReasoningUse | None = None  # None: the output has none
    images: list[ImageInput] = field(default_factory=list)  # those of the first prompt, which then is the only one


@dataclass(eq=False)
class GenerationRequest(ABC):
    """One request to a generation endpoint, whose body is valid. `GenerationHandler` calls `tokenize`, submits the
    prompts to the engine, and feeds the engine's updates to the builder of the response."""

    id_prefix: ClassVar[str]  # prefix of the response's id

    body: EngineBody
    model: ServedModel
    params: SamplingParams
    max_tokens: int | None = None  # The number that the client gave.
    streams: bool = False
    prompt_parameter: str = "prompt"  # The prompt's name in errors.
    num_prompts: int = 1
    at_once: int | None = None  # prompts submitted at the same time; the others follow when these are done
    more_text: int = 0  # characters of the prompt that are not in the body of the request

    @abstractmethod
    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the prompts; runs in a thread, once the request is admitted."""

    async def finish(self, builder: ResponseBuilder) -> None:  # noqa: B027 - most endpoints have nothing to do
        """Do what must be done once the output is complete, before the end of the response is sent."""

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        """Translate the parameter of an error to this endpoint's name."""
        return error
