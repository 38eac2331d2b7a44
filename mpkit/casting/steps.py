"""Forwards that run in steps: generators and coroutines, whose body runs after the call that made them returned."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

Block = Callable[[], AbstractContextManager[Any]]
Body = Generator[Any, Any, Any] | Coroutine[Any, Any, Any]


def takes_steps(output: object) -> bool:
    """Whether this result of a call is a body that has yet to run."""
    return type(output) in (GeneratorType, CoroutineType, AsyncGeneratorType)


def in_steps(body: object, block: Block, delivered: Callable[[Any], Any]) -> object:
    """The same generator or coroutine, each step of it inside `block()` and each result through `delivered`.

    Raises:  TypeError for an asynchronous generator.
    """
    if type(body) is GeneratorType:
        return _stepping(body, block, delivered, delivered)
    if type(body) is CoroutineType:
        return _awaiting(_Awaitable(_stepping(body, block, lambda waited_for: waited_for, delivered)))
    raise TypeError(
        "a forward that is an asynchronous generator cannot be cast; yield from a plain generator, or put the "
        "computation into a module of its own and cast that"
    )


def _stepping(
    body: Body, block: Block, yielded: Callable[[Any], Any], returned: Callable[[Any], Any]
) -> Generator[Any, Any, Any]:
    step, value = body.send, None
    try:
        while True:
            try:
                with block():
                    out = step(value)
            except StopIteration as end:
                return returned(end.value)
            try:
                step, value = body.send, (yield yielded(out))
            except GeneratorExit:
                raise
            except BaseException as error:  # what the caller throws in is the body's to handle
                step, value = body.throw, error
    finally:
        body.close()


class _Awaitable:
    def __init__(self, steps: Generator[Any, Any, Any]) -> None:
        self.steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.steps


async def _awaiting(awaitable: _Awaitable) -> Any:
    return await awaitable
