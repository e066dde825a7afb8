"""Conversion between text and token ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter, UnsupportedModel
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.detokenizer import (
    IncrementalDetokenizer,
    PieceDetokenizer,
    TokenPieces,
    WindowDetokenizer,
    backend_failure,
    decoding_rules,
)
from chairlift.text.images import ChatImages
from chairlift.text.messages import CallArguments, checked_messages, plain_data

_PROBE = 16  # characters per allowed token: how much of a long text is encoded to test whether it can fit
_MARKER = re.compile(r"<[^<>]+>")


class Tokenizer:
    """A model's tokenizer: a backend of the `tokenizers` library with chat template, BOS and incremental decoding."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
        template_variables: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # tokenizer files may contain the settings used for training
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._template_variables = {"bos_token": bos_token, "eos_token": eos_token} | dict(template_variables or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_texts = [token.content for token in added.values() if token.special and token.content]
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        # Special tokens, and markers such as <tool_call> that some models add as plain tokens; grammars can use them.
        self.marker_ids = self.special_ids | {id_ for id_, token in added.items() if _MARKER.fullmatch(token.content)}
        self._prepend: int | None = None
        if add_bos:
            self._prepend = None if bos_token is None else backend.token_to_id(bos_token)
            if self._prepend is None:
                raise InvalidParameter(
                    "add_bos", f"needs a bos_token of the vocabulary, but bos_token is {bos_token!r}"
                )

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encode a text. With `max_tokens`, raises for a text that is certainly longer, without encoding all of it."""
        self._check_length("prompt", text, max_tokens)
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode` for each text, in parallel."""
        encoded = _encoded(self._backend, texts, add_special_tokens)
        return [self._with_bos(ids, add_special_tokens) for ids in encoded]

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> list[int]:
        """Encode two texts as one, as an encoder reads pairs."""
        for text in (first, second):
            self._check_length("prompt", text, max_tokens)
        return _encoded(self._backend, [(first, second)], True)[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # A batch of one, because only batch calls release the GIL.
        try:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as error:
            raise backend_failure(error) from None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be half a character; empty for an unknown id."""
        if self._pieces is None:
            return (self._backend.id_to_token(token_id) or "").encode()
        piece = self._pieces.piece(token_id) or b""
        return piece if isinstance(piece, bytes) else piece.encode()

    def entry(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id)

    @property
    def has_token_bytes(self) -> bool:
        """Whether the text of a token is always `token_bytes`, independent of adjacent tokens."""
        return self._pieces is not None

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def detokenizer(
        self, skip_special_tokens: bool = True, visible: Iterable[int] = (), *, verbatim: bool = False
    ) -> IncrementalDetokenizer:
        """Create an incremental detokenizer. `visible` are special tokens that are never skipped.

        With `verbatim`, the first token keeps the space that some tokenizers remove from the start of a text, so that
        the text equals the joined `token_bytes`.
        """
        skip = self.special_ids.difference(visible) if skip_special_tokens else frozenset()
        if self._pieces is None:
            return WindowDetokenizer(self._backend, skip)
        return PieceDetokenizer(self._pieces, skip, verbatim=verbatim)

    @cached_property
    def first_ids(self) -> list[int]:
        """The special tokens that every encoded text begins with, such as BOS."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def added_token_id(self, token: str) -> int | None:
        """Return the id of an added token, special or not; None for other tokens."""
        return self._added_ids.get(token)

    def special_ids_of(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are special tokens."""
        return [token for text in texts if (token := self._added_ids.get(text)) in self.special_ids]

    @cached_property
    def template_strings(self) -> frozenset[str]:
        """The strings in the source of the chat template, such as the roles that it knows."""
        return frozenset() if self._template is None else self._template.strings

    @cached_property
    def template_names(self) -> frozenset[str]:
        """The names of fields that the chat template may read in a message."""
        return frozenset() if self._template is None else self._template.names

    @cached_property
    def template_shows_tools(self) -> bool:
        return "tools" in self.template_reads

    @cached_property
    def template_shows_later_system(self) -> bool:
        """Whether the chat template shows a message of the system behind others, and does not refuse or drop it."""
        words = ("first", "question", "later", "answer")
        roles = ("system", "user", "system", "assistant")
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        try:
            return "later" in self.apply_chat_template(messages, add_generation_prompt=False)
        except (InvalidParameter, UnsupportedModel):
            return False

    @cached_property
    def template_reads(self) -> frozenset[str]:
        """The names of the chat template's variables."""
        return frozenset() if self._template is None else self._template.reads

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the prompt of a conversation. It contains its special tokens: encode it with
        `add_special_tokens=False`.

        `kwargs` are variables of the model's template, such as `enable_thinking`.
        """
        plain = {name: plain_data(name, value) for name, value in {"tools": tools, **kwargs}.items()}
        return self._render(checked_messages(messages), add_generation_prompt=add_generation_prompt, **plain)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        max_tokens: int | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """Return a conversation's prompt as text and as token ids.

        `options` are those of `apply_chat_template`; `max_tokens` is that of `encode`. With `continue_final_message`,
        the prompt ends with the content of the last message, which the model continues.

        Only the template can write special tokens: one in a message, a tool or a template's variable stays text.
        """
        plain = {name: plain_data(name, value) for name, value in options.items()}
        return self.encode_checked_chat(
            checked_messages(messages), max_tokens=max_tokens, continue_final_message=continue_final_message, **plain
        )

    def encode_checked_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        max_tokens: int | None = None,
        continue_final_message: bool = False,
        images: ChatImages | None = None,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """Like `encode_chat`, for messages and options that are known to be plain data."""
        expand: Callable[[str], str] = str
        wants_parts = self._template is not None and self._template.wants_parts
        if wants_parts or (images is not None and images.sources):
            images = images or ChatImages()
            messages, expand = images.shown(messages, as_parts=wants_parts), images.expander()
        escaper = SpecialTokenEscaper(self._special_texts)
        escaped = {name: escaper.escape(value) for name, value in options.items()}
        hidden = escaper.escape(messages)
        if continue_final_message:
            rendered = self._render_unfinished(hidden, escaper.end_marker, escaped)
        else:
            rendered = self._render(hidden, **escaped)
        self._check_length("messages", rendered, max_tokens)
        text, ids = "", list[int]()
        for piece, is_text in escaper.pieces(rendered):
            piece = piece if is_text else expand(piece)
            text += piece
            ids += _encoded(self._text_only_backend if is_text else self._backend, [piece], False, "messages")[0]
        return text, ids

    def _render_unfinished(self, messages: list[dict[str, Any]], marker: str, options: Mapping[str, Any]) -> str:
        """Render a conversation up to the end of its last message's content, where `marker` is put."""
        parameter = "continue_final_message"
        if options.get("add_generation_prompt"):
            raise InvalidParameter(parameter, "was given together with add_generation_prompt; give one")
        last = messages[-1]
        if not last["content"]:
            raise InvalidParameter(parameter, "the final message has no content to continue")
        marked = [*messages[:-1], last | {"content": last["content"] + marker}]
        prompt, end, _ = self._render(marked, **{**options, "add_generation_prompt": False}).partition(marker)
        if not end:
            raise InvalidParameter(parameter, "this model's chat template does not show the final message as it is")
        return prompt

    def _render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        if self._template is None:
            raise InvalidParameter("messages", "this model has no chat template; use plain prompts")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self._template_variables,
            variables=variables,
            checked=True,
        )

    def _check_length(self, parameter: str, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or not isinstance(text, str) or len(text) <= _PROBE * max_tokens:
            return
        too_long = len(text) > self.longest_token * max_tokens
        if not too_long:
            # Truncating a text changes only the tokens at the cut, so twice the limit is conclusive.
            too_long = len(_encoded(self._backend, [text[: _PROBE * max_tokens]], False, parameter)[0]) > 2 * max_tokens
        if too_long:
            problem = f"has {len(text)} characters, far more than fit into this model's maximum context length"
            raise InvalidParameter(parameter, f"{problem} of {max_tokens} tokens", CONTEXT_LENGTH_EXCEEDED)

    @cached_property
    def _text_only_backend(self) -> Backend:
        """A copy of the backend that encodes special tokens as text, created when user text first contains one."""
        copy = Backend.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _template(self) -> ChatTemplate | None:
        # Compiled on first use, so that plain prompts work with a broken template.
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        rules = decoding_rules(self._backend)
        return None if rules is None else TokenPieces(self._backend, rules)

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """Prepend the BOS token unless the backend (or the text itself) already did."""
        if self._prepend is None or not add_special_tokens or ids[:1] == [self._prepend]:
            return ids
        return [self._prepend, *ids]


def _encoded(
    backend: Backend, texts: Sequence[str | tuple[str, str]], add_special_tokens: bool, parameter: str = "prompt"
) -> list[list[int]]:
    if not all(isinstance(part, str) for text in texts for part in (text if isinstance(text, tuple) else [text])):
        raise InvalidParameter(parameter, "must be a string of valid Unicode")
    try:
        # The fast variant omits offsets, which are not needed, and only a batch releases the GIL.
        return [encoding.ids for encoding in backend.encode_batch_fast([*texts], add_special_tokens=add_special_tokens)]
    except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
        raise InvalidParameter(parameter, "must be a string of valid Unicode") from error
    except BaseException as error:
        raise backend_failure(error) from None


class SpecialTokenEscaper:
    """Replaces special tokens in the messages of one conversation by random placeholders, which no message can contain.

    A chat template marks roles with special tokens, so a user message that contains one could start a system message.
    Therefore special tokens in messages are replaced before rendering. The rendered prompt is then split at the
    placeholders, and each special token in its place is encoded as plain text.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)  # longest first: the longest match wins
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._special = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        nonce = secrets.token_hex(8)
        self.end_marker = f"\ue000{nonce}-end\ue001"  # marks the place after which the prompt is cut
        self._placeholder = f"\ue000{nonce}-%d\ue001"
        self._placeholders = re.compile(f"\ue000{nonce}-([0-9]+)\ue001")

    def escape(self, value: Any) -> Any:
        """Return `value` (messages or a part of them) with all special tokens in strings replaced by placeholders."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._placeholder % self._numbers[found[0]], value)
        if isinstance(value, Mapping):
            escaped = {self.escape(key): self.escape(item) for key, item in value.items()}
            return CallArguments(escaped) if isinstance(value, CallArguments) else escaped
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Split the prompt at the placeholders: yield each piece, and whether it is an escaped special token."""
        for index, piece in enumerate(self._placeholders.split(rendered)):
            if index % 2:
                yield self._tokens[int(piece)], True
            elif piece:
                yield piece, False
