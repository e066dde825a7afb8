"""A Ray in this process: actors are objects, and their methods run when they are called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Reference:
    """The result of a call, an error included."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        try:
            self.value = call()
        except RayError as error:
            self.error = error
        except Exception as error:
            self.error = RayTaskError(error)


class FakeRay:
    """Stands for the module; `exceptions` are those of Ray that a driver distinguishes."""

    class exceptions:  # noqa: N801
        RayError, RayTaskError = RayError, RayTaskError

    def __init__(self) -> None:
        self.num_actors = 0
        self.num_killed = 0

    def remote(self, actor_class: type) -> Any:
        return ActorClass(self, actor_class)

    def wait(self, references: list[Reference], num_returns: int = 1, timeout: float | None = None) -> Any:
        assert references
        return references[:num_returns], references[num_returns:]

    def get(self, reference: Reference) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def kill(self, actor: Any) -> None:
        self.num_killed += 1


class ActorClass:
    def __init__(self, ray: FakeRay, actor_class: type) -> None:
        self._ray, self._class = ray, actor_class

    def options(self, **options: Any) -> ActorClass:
        return self

    def remote(self, *arguments: Any) -> Any:
        self._ray.num_actors += 1
        return Actor(self._class(*arguments))


class Actor:
    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)

        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        return type("Method", (), {"remote": staticmethod(lambda *arguments: Reference(lambda: call(*arguments)))})
