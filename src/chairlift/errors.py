"""Exceptions for callers of Chairlift, by what can be done about them."""

from __future__ import annotations

import errno


class ChairliftError(Exception):
    """Base class of the exceptions that Chairlift raises on purpose."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class InvalidParameter(ChairliftError, ValueError):
    """A value from the caller cannot be used; `parameter` is its name, empty for the whole input; `code` is the kind of
    error in OpenAI's API."""

    def __init__(self, parameter: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(f"{parameter}: {problem}" if parameter else problem)
        self.parameter = parameter
        self.problem = problem
        self.code = code

    def __reduce__(self) -> tuple[type[InvalidParameter], tuple[str, str, str]]:
        """Copy it by its own arguments, when it comes from another process."""
        return type(self), (self.parameter, self.problem, self.code)

    def renamed(self, parameter: str) -> InvalidParameter:
        """Return the same error with another name of the parameter."""
        return InvalidParameter(parameter, self.problem, self.code)


class ModelNotFound(ChairliftError):
    """No model has this name, or it could not be downloaded."""


class UnsupportedModel(ChairliftError):
    """The checkpoint's architecture, or a feature of it, is not supported."""


class CorruptCheckpoint(ChairliftError):
    """A file of the checkpoint is damaged, truncated or malicious."""


class TemporaryFailure(ChairliftError):
    """The request failed for a reason outside of it; a retry may succeed."""


class StorageFull(TemporaryFailure):
    """Something cannot be written because the disk is full, or a quota of it."""


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written for lack of space."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, StorageFull) or (isinstance(error, OSError) and error.errno in full)


class EngineDead(ChairliftError):
    """The engine failed earlier and accepts no more requests."""


class EngineDied(EngineDead):
    """The engine failed while it worked on this request."""
