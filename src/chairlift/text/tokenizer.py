"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from tokenizers import Tokenizer as Backend

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.detokenizer import (
    IncrementalDetokenizer,
    PieceDetokenizer,
    TokenPieces,
    WindowDetokenizer,
    decoding_rules,
)
from chairlift.text.messages import checked_messages
from chairlift.text.spelled_tokens import SpelledTokens


class Tokenizer:
    """One model's tokenizer: a backend of the `tokenizers` library plus what that library leaves to others."""

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
        backend.no_truncation()  # a backend from elsewhere may still have the settings of its training
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._template_variables = {"bos_token": bos_token, "eos_token": eos_token} | dict(template_variables or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._prepend = self._bos_to_prepend() if add_bos else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoding = _encoded(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens))
        return self._with_bos(encoding.ids, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode` for each text, in parallel."""
        batch = [*texts]
        encodings = _encoded(lambda: self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens))
        return [self._with_bos(encoding.ids, add_special_tokens) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, visible: Iterable[int] = ()) -> IncrementalDetokenizer:
        """A new stream of text that takes one token at a time. `visible` are special tokens never to be skipped."""
        skip = self.special_ids.difference(visible) if skip_special_tokens else frozenset()
        if self._pieces is None:
            return WindowDetokenizer(self._backend, skip)
        return PieceDetokenizer(self._pieces, skip)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def added_token_id(self, token: str) -> int | None:
        """The id of a token that is a whole by itself, special or not, and never put together from others."""
        return self._added_ids.get(token)

    @property
    def template_shows_tools(self) -> bool:
        return self._template is not None and self._template.shows_tools

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with `add_special_tokens=False`: it has its own.

        `kwargs` are variables of the model's template, such as `enable_thinking`.
        """
        if self._template is None:
            raise InvalidParameter("messages", "this model has no chat template; use plain prompts")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self._template_variables,
            variables=kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """A conversation's prompt as text and as token ids. Options are those of `apply_chat_template`.

        Only the template writes special tokens: one that is spelled out in a message or a tool stays text.
        """
        spelled = SpelledTokens(self._special_texts)
        rendered = self.apply_chat_template(
            spelled.hide(checked_messages(messages)), tools=spelled.hide(tools), **options
        )
        text, ids = "", list[int]()
        for piece, is_text in spelled.pieces(rendered):
            text += piece
            backend = self._text_only_backend if is_text else self._backend
            ids += _encoded(partial(backend.encode, piece, add_special_tokens=False)).ids
        return text, ids

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _special_texts(self) -> list[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content]

    @cached_property
    def _text_only_backend(self) -> Backend:
        """The same tokenizer, blind to special tokens. A copy, made when someone first spells one out."""
        copy = Backend.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _template(self) -> ChatTemplate | None:
        # Compiled at first use: a broken template is no reason to refuse plain prompts.
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        rules = decoding_rules(self._backend)
        return None if rules is None else TokenPieces(self._backend, rules)

    def _bos_to_prepend(self) -> int:
        token_id = None if self.bos_token is None else self.token_id(self.bos_token)
        if token_id is None:
            raise InvalidParameter(
                "add_bos", f"needs a bos_token of the vocabulary, but bos_token is {self.bos_token!r}"
            )
        return token_id

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """Put the bos token first unless the backend (or the text itself) already did."""
        if self._prepend is None or not add_special_tokens or ids[:1] == [self._prepend]:
            return ids
        return [self._prepend, *ids]


def _encoded(encode: Callable[[], Any]) -> Any:
    try:
        return encode()
    except (TypeError, UnicodeEncodeError) as error:
        # The backend says so for anything that is not text, and for text with lone surrogates.
        raise InvalidParameter("prompt", "must be a string of valid Unicode") from error
    except Exception as error:  # the library has no type of its own, for a vocabulary without an unknown token say
        raise UnsupportedModel(f"the model's tokenizer failed on this text: {error}") from error
