"""Neighbours in an nn.Sequential hand over in 16 bits what they would cast to float32 and straight back.

At O1 a listed module gives float32, and the next one casts that down again. Both casts are exact, forwards and
backwards, and in an `nn.Sequential` nothing but the next module ever holds the tensor between them. So no bit of a
result or a gradient changes (MindSpore 2.7 removes such pairs too, in its graph). In a hand-written forward both casts
are made: while it runs nobody knows whether a tensor will be used once more, by an addition, which takes it in float32,
and then two gradients would be added up in 16 bits. `torch.compile` sees the whole forward and leaves the pair out.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from mpkit.casting.handlers import Handler
from mpkit.casting.leaves import BY_HANDLER, arguments, by_handler
from mpkit.casting.rules import Rule


def round_trip(module: nn.Module, rule: Rule) -> Handler | None:
    """What a module does by `rule` that is one operation from 16 bits to float32.

    None if it is more than that, or somebody watches it by a hook.
    """
    if type(module) not in BY_HANDLER or not by_handler(module):
        return None
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or module._compiled_call_impl is not None:
        return None
    handler = rule.handlers.get(BY_HANDLER[type(module)][0].__name__)
    return handler if handler is not None and handler.round_trip is not None else None


def in_sequence(mode: TorchFunctionMode, sequence: nn.Sequential, handlers: list[Handler | None], x: Any) -> Any:
    """`nn.Sequential.forward` under `mode`, given the `round_trip` of each module; the others are called as always."""
    listening = True
    try:
        for module, handler, after in zip(sequence, handlers, [*handlers[1:], None]):
            if listening is not (handler is None):  # a handler runs outside its mode, as it does when the mode calls it
                listening = not listening
                mode.__enter__() if listening else mode.__exit__(None, None, None)
            if handler is None:
                x = module(x)
                continue
            kind = type(module)
            hands_over = after is not None and after.computes is handler.computes
            run = handler.round_trip if hands_over and handler.round_trip is not None else handler.run
            x = run(mode, BY_HANDLER[kind][0], arguments(kind, module, x), {})  # type: ignore[arg-type]
    finally:
        if not listening:
            mode.__enter__()
    return x
