"""Workloads: prompts of token ids with how many tokens to generate for each, and the texts of the benches."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_WORKLOAD_MIB = 256  # some ten million tokens


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_ids: tuple[int, ...]
    n_out: int  # exactly this many tokens are generated, past any end-of-sequence token


@dataclass(frozen=True, slots=True)
class Workload:
    requests: tuple[BenchRequest, ...]

    @property
    def input_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.n_out for request in self.requests)

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output, of any request."""
        return max(len(request.prompt_ids) + request.n_out for request in self.requests)

    def warm_up(self, requests: int = 4) -> Workload:
        """A few short requests with reversed prompts, so that no prefix of the workload gets cached."""
        some = self.requests[:requests]
        return Workload(tuple(BenchRequest(one.prompt_ids[::-1], min(one.n_out, 8)) for one in some))


def full_length(count: int) -> SamplingParams:
    """Greedy decoding of exactly `count` tokens: ids only, no text, as for other engines."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


class TokenSource:
    """Random tokens of a vocabulary; the same seed gives the same tokens."""

    def __init__(self, vocabulary: Sequence[int], seed: int | str) -> None:
        self._vocabulary, self._rng = vocabulary, random.Random(seed)

    def draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._vocabulary, k=count))


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, parameter: str, text: str) -> LengthRange:
        """ "16:512", or "128" for always the same."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            raise InvalidParameter(parameter, f"must look like 16:512 or 128, got {text!r}") from None
        if not 1 <= lengths.low <= lengths.high:
            raise InvalidParameter(parameter, f"must rise from at least 1, got {text!r}")
        return lengths

    @property
    def middle(self) -> float:
        """The geometric mean, since lengths are log-uniform."""
        return math.sqrt(self.low * self.high)

    def draw(self, source: random.Random) -> int:
        """A log-uniform length: as many between 16 and 32 as between 256 and 512, as in real traffic."""
        spread = (self.high + 1) / self.low
        return min(int(self.low * spread ** source.random()), self.high)

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class SpreadLengths:
    """Gamma-distributed lengths; `variation` is their standard deviation divided by their mean.

    0: all equal; 1: an exponential distribution; above 1: a few very long ones among many short ones.
    """

    mean: int
    variation: float
    longest: int  # longer draws are cut to this

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.longest:
            raise InvalidParameter("mean", f"must be between 1 and {self.longest}, got {self.mean}")
        if not 0 <= self.variation < float("inf"):
            raise InvalidParameter("variation", f"must be at least 0, got {self.variation}")

    def draw(self, source: random.Random) -> int:
        if self.variation == 0:
            return self.mean
        shape = self.variation**-2
        return min(max(1, round(source.gammavariate(shape, self.mean / shape))), self.longest)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The first `share` of every prompt is the beginning of one of `groups` long texts."""

    share: float
    groups: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidParameter("shared_prefix", f"must be a share of the prompt from 0 to 1, got {self.share}")
        if self.groups < 1:
            raise InvalidParameter("prefix_groups", f"must be at least 1, got {self.groups}")


def make_workload(
    vocabulary: Sequence[int], *, requests: int, prompt_len: LengthRange, output_len: LengthRange, seed: int
) -> Workload:
    """The first `requests` of those that `draw_requests` gives."""
    if requests < 1:
        raise InvalidParameter("requests", f"must be at least 1, got {requests}")
    drawn = draw_requests(vocabulary, prompt_len=prompt_len, output_len=output_len, seed=seed)
    return Workload(tuple(islice(drawn, requests)))


def draw_requests(
    vocabulary: Sequence[int],
    *,
    prompt_len: LengthRange,
    output_len: LengthRange,
    seed: int,
    shared: SharedPrefixes | None = None,
) -> Iterator[BenchRequest]:
    """Random prompts out of the token ids in `vocabulary`, without end; the same arguments give the same ones."""
    source = random.Random(seed)
    texts = []
    if shared and shared.share:
        group, size = random.Random(f"groups {seed}"), round(prompt_len.high * shared.share)
        texts = [group.choices(vocabulary, k=size) for _ in range(shared.groups)]
    while True:
        length = prompt_len.draw(source)
        prompt = source.choices(vocabulary, k=length)
        if shared and texts:
            common = round(length * shared.share)
            prompt[:common] = source.choice(texts)[:common]
        yield BenchRequest(tuple(prompt), output_len.draw(source))


def text_like_ids(tokenizer: Tokenizer) -> list[int]:
    """The token ids of words and parts of words: no control tokens, no stray bytes."""
    # Decoding drops control tokens, so they decode to an empty text.
    tokens = [token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]).strip().isalpha()]
    if not tokens:
        raise InvalidParameter("model", "its tokenizer has no tokens of letters; give a --workload file instead")
    return tokens


def load_workload(path: Path) -> Workload:
    """Read JSON of the form {"requests": [{"prompt_ids": [1, 2, 3], "n_out": 4}, …]}; other keys are ignored."""
    text = read_text(path, "workload", MAX_WORKLOAD_MIB)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("workload", f"cannot read {str(path)!r} as JSON ({error})") from None
    entries = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InvalidParameter("workload", f'{str(path)!r} has no list "requests" with something in it')
    return Workload(tuple(_parse_request(index, entry) for index, entry in enumerate(entries)))


def _parse_request(index: int, entry: Any) -> BenchRequest:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    prompt_ids, n_out = fields.get("prompt_ids"), fields.get("n_out")
    if not isinstance(prompt_ids, list) or not prompt_ids or not all(_is_count(token) for token in prompt_ids):
        raise InvalidParameter("workload", f"request {index}: prompt_ids must be a list of token ids")
    if not _is_count(n_out) or not n_out:
        raise InvalidParameter("workload", f"request {index}: n_out must be an integer of at least 1, got {n_out!r}")
    return BenchRequest(tuple(prompt_ids), n_out)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# What speculation is measured on, and what lossy options are judged on.
_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))

# Prose, instructions, code, tables, dialogue and other languages, by which lossy options are judged.
QUALITY_TEXTS: tuple[str, ...] = tuple(_TEXTS["quality"])


def _pick(kind: str, index: int) -> str:
    """One of the names, towns, things or questions, in turn."""
    choices: list[str] = _TEXTS[kind]
    return choices[index % len(choices)]


def extraction(index: int) -> str:
    """Copy a table."""
    rows = [
        f"{name}, {_pick('towns', index + place)}, {name.split()[0].lower()}{index}@example.com"
        for place, name in enumerate(_TEXTS["names"])
    ]
    return str(_TEXTS["extraction"].format(table="\n".join(rows)))


def code_edit(index: int) -> str:
    """Rewrite a program with a small change."""
    return str(_TEXTS["code-edit"].format(thing=_pick("things", index)))


def quotes(index: int) -> str:
    """Summarise a text with quotes from it."""
    return str(_TEXTS["quotes"].format(town=_pick("towns", index), name=_pick("names", index)))


def chat(index: int) -> str:
    """Answer an open question, without repeating the prompt."""
    question = _pick("questions", index)
    return question if index < len(_TEXTS["questions"]) else f"{question} (Answer no. {index}.)"


# Of these, only the output of chat does not repeat its prompt.
SCENARIOS: dict[str, Callable[[int], str]] = {
    "extraction": extraction,
    "code-edit": code_edit,
    "quotes": quotes,
    "chat": chat,
}
