"""The errors that users of Chairlift can meet, by what can be done about them."""

from __future__ import annotations


class ChairliftError(Exception):
    """Base class of the errors raised on purpose."""


class InvalidParameter(ChairliftError, ValueError):
    """A value from the caller cannot be used; `parameter` is its name."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


class ModelNotFound(ChairliftError):
    """There is no model of that name, or it could not be fetched."""


class UnsupportedModel(ChairliftError):
    """The architecture of the checkpoint, or a feature of it, is not supported."""


class CorruptCheckpoint(ChairliftError):
    """A file of the checkpoint is damaged, truncated or malicious."""


class TemporaryFailure(ChairliftError):
    """The failure has nothing to do with the request, which may succeed if repeated."""


class EngineDead(ChairliftError):
    """The engine failed earlier and accepts no more requests."""
