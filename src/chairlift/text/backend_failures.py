"""Exceptions and panics of the `tokenizers` library, as errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.errors import ChairliftError, UnsupportedModel


@contextmanager
def backend_failures() -> Iterator[None]:
    """Raise UnsupportedModel for a failure of the library, such as a regular expression that backtracks too much."""
    try:
        yield
    except ChairliftError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UnsupportedModel(f"the model's tokenizer failed on this text: {error}") from None


def is_failure(error: BaseException) -> bool:
    """Whether this is an exception or a Rust panic, which is no `Exception`, rather than an interrupt."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
