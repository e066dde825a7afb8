"""What a caller may ask of the sampler, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from chairlift.core.structure import Structure
from chairlift.errors import InvalidParameter

MAX_COMPLETIONS = 128
MAX_BEAM_WIDTH = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of all of them: each completion searches for them anew, while the others wait
MAX_SEED = 2**63 - 1

_NOT_WITH_BEAMS: tuple[tuple[str, Any], ...] = (  # and what stands for "not given"
    *(("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("logit_bias", None), ("best_of", None), ("stop", ())),
    *(("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Born valid; never changed.

    Names and defaults follow what users of this field know. `temperature=0` is greedy. `top_k=0` (or -1)
    and `top_p=1.0` switch those filters off. `max_tokens=None` means "until the context is full".
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    visible_special_ids: Sequence[int] | None = None  # special tokens that are text even so, such as <tool_call>
    detokenize: bool = True
    structure: Structure | None = None
    best_of: int | None = None  # generate so many, return the `n` with the highest mean log-probability
    beam_width: int | None = None  # beam search: nothing is drawn, and the `n` best hypotheses are returned
    length_penalty: float = 1.0  # a hypothesis' score is its log-probability / length ** length_penalty
    early_stopping: bool | str = False  # when a search ends: True, False or "never", as transformers defines them

    def __post_init__(self) -> None:
        self._normalise()
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}"
            raise InvalidParameter("min_tokens", problem)
        for token in self.stop_ids:
            _integer("stop_token_ids", token, 0)
        for token in self.visible_special_ids or ():
            _integer("visible_special_ids", token, 0)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop_strings)}")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise InvalidParameter("stop", "must be non-empty strings")
        if sum(map(len, self.stop_strings)) > MAX_STOP_CHARACTERS:
            raise InvalidParameter("stop", f"at most {MAX_STOP_CHARACTERS} characters in all strings together")
        if self.stop_strings and not self.detokenize:
            raise InvalidParameter("stop", "needs detokenize=True: stop strings are found in the text")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"must be true or false, got {getattr(self, name)!r}")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise InvalidParameter("structure", f"must be a Structure, got {type(self.structure).__name__}")
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_COMPLETIONS)
            if self.best_of == self.n:
                object.__setattr__(self, "best_of", None)  # nothing to choose
        self._check_beams()

    def _check_beams(self) -> None:
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never") or not isinstance(self.early_stopping, (bool, str)):
            raise InvalidParameter("early_stopping", f"must be true, false or 'never', got {self.early_stopping!r:.40}")
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidParameter(name, "only goes with beam_width")
            return
        _integer("beam_width", self.beam_width, 2, MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise InvalidParameter("n", f"must not exceed beam_width ({self.beam_width}), got {self.n}")
        if self.temperature not in (0.0, 1.0):
            raise InvalidParameter("temperature", "must be 0 or 1 with beam_width: beam search draws nothing")
        for name, default in _NOT_WITH_BEAMS:
            if getattr(self, name) != default:
                raise InvalidParameter(name, "is not supported with beam_width")
        if self.structure is not None:
            raise InvalidParameter(self.structure.parameter, "is not supported with beam_width")

    def _normalise(self) -> None:
        """Turn the spellings that callers use into one: no lists that could change later, no -1 for "off"."""
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(_sequence("stop", self.stop))
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(_sequence("stop_token_ids", self.stop_token_ids)))
        visible = tuple(_sequence("visible_special_ids", self.visible_special_ids))
        object.__setattr__(self, "visible_special_ids", visible)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidParameter("logit_bias", "must map token ids to numbers")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """How many texts are generated to get `n` of them."""
        return self.beam_width or self.best_of or self.n

    def check_streamable(self) -> None:
        """Raise if which completions are returned is not known before all are over."""
        for name in ("beam_width", "best_of"):
            if getattr(self, name) is not None:
                raise InvalidParameter(name, "cannot be streamed: which completions are best shows only in the end")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked like a new one."""
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                raise InvalidParameter(name, "is not a sampling parameter")
        return replace(self, **changes)


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidParameter(name, f"must be a list, got {type(value).__name__}")
    return value


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    limits = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, f"must be {limits}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise InvalidParameter(name, f"must be {limits}, got {value}")


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    limits = f"a number {'above' if low_open else 'of at least'} {low:g} and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidParameter(name, f"must be {limits}, got {value!r}")
    if value < low or value > high or (low_open and value == low):
        raise InvalidParameter(name, f"must be {limits}, got {value}")
