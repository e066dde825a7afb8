"""Every error a user of Chairlift can meet, as a type that says whose turn it is to act."""

from __future__ import annotations


class ChairliftError(Exception):
    """The base of all errors raised on purpose."""


class InvalidParameter(ChairliftError, ValueError):
    """A value the caller passed cannot work; `parameter` names it."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


class ModelNotFound(ChairliftError):
    """No model goes by that name here, or it could not be fetched."""


class UnsupportedModel(ChairliftError):
    """The checkpoint was read but its architecture or a feature of it is not supported."""


class CorruptCheckpoint(ChairliftError):
    """A file of the checkpoint is damaged, truncated or hostile."""


class TemporaryFailure(ChairliftError):
    """Something beside the request went wrong; the same request may well succeed a moment later."""


class EngineDead(ChairliftError):
    """The engine met a fatal error earlier and takes no more work."""
