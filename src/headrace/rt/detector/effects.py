"""Recorded effects of launches against the declared ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

import torch

from headrace.rt.detector.report import byte_view, name_byte
from headrace.rt.effects import Effect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from headrace.rt.detector.report import LaunchRecord

Nested: TypeAlias = Union[torch.Tensor, "Sequence[Nested]", "Mapping[str, Nested]", None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBound:
    """Rows of an argument that a launch may touch at most.

    Attributes:
        axis: Axis of the argument that counts rows.
        reads, writes: Rows, or None for all.
    """

    axis: int = 0
    reads: Collection[int] | None = None
    writes: Collection[int] | None = None


def assert_effects(
    launches: Sequence[LaunchRecord],
    effects: Mapping[str, Effect],
    arguments: Mapping[str, Nested],
    *,
    rows: Mapping[str, RowBound] | None = None,
    unused: Collection[str] = (),
) -> None:
    """Compare what launches did to their arguments with what their op declares.

    Args:
        launches: Launches of one or several calls of the op with these arguments.
        effects: Declared effect by argument (`rt.Op.effects`).
        arguments: Tensors by argument, nested as the op takes them.
        rows: Tighter bounds by argument.
        unused: Arguments whose declared effect need not occur in these launches.

    Raises:
        AssertionError: A launch touched what is not declared (too narrow: hides races), or never
            touched what is (too wide: makes false reports).
    """
    rows = rows or {}
    named = {
        label: (name, tensor)
        for name, value in arguments.items()
        for label, tensor in _flatten(name, value)
    }
    problems = list(_undeclared(launches, effects, named, rows))
    problems += _unseen(launches, effects, arguments, unused)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(f"declared effects are not the recorded ones:\n{lines}")


def _undeclared(
    launches: Sequence[LaunchRecord],
    effects: Mapping[str, Effect],
    named: Mapping[str, tuple[str, torch.Tensor]],
    rows: Mapping[str, RowBound],
) -> Iterator[str]:
    """Bytes of the arguments that were touched although nothing declares it."""
    tensors = {label: tensor for label, (_, tensor) in named.items()}
    for effect, verb in ((Effect.READ, "reads"), (Effect.WRITE, "writes")):
        allowed: dict[int, torch.Tensor] = {}
        for name, tensor in named.values():
            storage = tensor.untyped_storage()
            flags = allowed.setdefault(
                storage.data_ptr(), torch.zeros(storage.nbytes(), dtype=torch.bool)
            )
            if effect in effects.get(name, Effect(0)):
                _allow(byte_view(flags, tensor), rows.get(name), effect)
        for launch in launches:
            for start, flags in allowed.items():
                outside = _touched(launch, start, len(flags), effect) & ~flags
                if outside.any():
                    first = int(outside.to(torch.uint8).argmax())
                    label, index, _ = name_byte(tensors, start, first)
                    yield f"{launch.kernel} {verb} {label}{index}, which is not declared"


def _allow(view: torch.Tensor, bound: RowBound | None, effect: Effect) -> None:
    chosen = None
    if bound is not None:
        chosen = bound.reads if effect is Effect.READ else bound.writes
    if bound is None or chosen is None:
        view.fill_(1)
        return
    for row in chosen:
        view.select(bound.axis, row).fill_(1)


def _unseen(
    launches: Sequence[LaunchRecord],
    effects: Mapping[str, Effect],
    arguments: Mapping[str, Nested],
    unused: Collection[str],
) -> Iterator[str]:
    """Declared effects that never happened."""
    for name, declared in effects.items():
        if name in unused:
            continue
        for effect in (Effect.READ, Effect.WRITE):
            if effect in declared and not any(
                bool(_touched_elements(launch, tensor, effect).any())
                for launch in launches
                for _, tensor in _flatten(name, arguments.get(name))
            ):
                verb = "reads" if effect is Effect.READ else "writes"
                yield f"no launch {verb} {name}, although that is declared"


def _touched(launch: LaunchRecord, start: int, size: int, effect: Effect) -> torch.Tensor:
    """Bytes of a storage; an atomic both reads and writes."""
    access = "R" if effect is Effect.READ else "W"
    plain = launch.touched_bytes(start, size, access)
    return torch.from_numpy(plain | launch.touched_bytes(start, size, "A"))


def _touched_elements(launch: LaunchRecord, tensor: torch.Tensor, effect: Effect) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return byte_view(_touched(launch, storage.data_ptr(), storage.nbytes(), effect), tensor)


def _flatten(name: str, value: Nested) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif value is not None:
        items = value.items() if hasattr(value, "items") else enumerate(value)
        for key, member in items:
            yield from _flatten(f"{name}[{key}]", member)
