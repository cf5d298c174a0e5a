"""Ops: step functions with their effects declared once, beside the code.

A launch derives what it reads and writes from its actual arguments and from this declaration, so
the two cannot drift apart at a call site.
"""

from __future__ import annotations

import enum
import inspect
from typing import TYPE_CHECKING, Generic, ParamSpec

from headrace.rt.errors import EffectError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")


class Effect(enum.Flag):
    """What an op may do to the memory behind one argument."""

    READ = enum.auto()
    WRITE = enum.auto()
    READ_WRITE = READ | WRITE


Read = Effect.READ
Write = Effect.WRITE
ReadWrite = Effect.READ_WRITE


class Op(Generic[P]):
    """A step function with declared effects; made by `op`.

    Calling it runs the function at once on plain tensors, which is how ops are unit-tested and how
    one op uses another. On runtime buffers it is launched with `Runtime.launch`.

    Attributes:
        fn: The function. It gets plain tensors and returns None: results go to its outputs.
        name: Qualified name, used in reports.
        effects: Effect of each buffer argument.
        reads, writes: The same, apart.
        role: What the op is to the engine ("forward", "zero", "restore", "checkpoint", ...); the
            checker counts which roles overlapped on which kind of state.
    """

    def __init__(self, fn: Callable[P, None], effects: Mapping[str, Effect], role: str) -> None:
        parameters = inspect.signature(fn).parameters
        name = getattr(fn, "__qualname__", repr(fn)).replace("<locals>.", "")
        for parameter in parameters.values():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                raise EffectError(
                    f"op {name}: parameter {parameter.name!r} is {parameter.kind.description}; "
                    "make every parameter keyword-only (start the list with *)"
                )
        for argument, effect in effects.items():
            if argument not in parameters:
                raise EffectError(
                    f"op {name} declares an effect on {argument!r}, which is not one of its "
                    f"parameters ({', '.join(parameters)})"
                )
            if effect not in (Effect.READ, Effect.WRITE, Effect.READ_WRITE):
                raise EffectError(
                    f"op {name}: effect of {argument!r} is {effect!r}; "
                    "use rt.Read, rt.Write or rt.ReadWrite"
                )
        self.fn = fn
        self.name = name
        self.effects = dict(effects)
        self.reads = {name: bool(effect & Effect.READ) for name, effect in effects.items()}
        self.writes = {name: bool(effect & Effect.WRITE) for name, effect in effects.items()}
        self.role = role
        self.__wrapped__ = fn
        self.__name__ = getattr(fn, "__name__", name)
        self.__doc__ = fn.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the function on plain tensors, outside any queue."""
        self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Op({self.name})"


def op(*, role: str = "step", **effects: Effect) -> Callable[[Callable[P, None]], Op[P]]:
    """Declare the effects of a step function or kernel wrapper.

    Args:
        role: See `Op.role`.
        **effects: `Read`, `Write` or `ReadWrite` for each parameter that is given a Buffer, a View
            or a (nested) tuple, list or dict of them. Other parameters get immutable values.

    Returns:
        A decorator that turns a function of keyword-only parameters into an `Op`.

    Raises:
        EffectError: A parameter is unknown, not keyword-only, or its effect is not an effect.
    """

    def declare(fn: Callable[P, None]) -> Op[P]:
        return Op(fn, effects, role)

    return declare
