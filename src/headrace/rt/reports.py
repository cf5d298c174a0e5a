"""What the checker says: two accesses, where they were made, and the seed that makes them again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

_RT_FOLDER = str(Path(__file__).parent)
_LIBRARIES = (f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", "<")
_ROOT = str(Path(__file__).parents[3]) + "/"
STACK_LIMIT = 8
"""Frames kept of each stack, innermost first."""

Stack = tuple[tuple["CodeType", int], ...]
"""Code object and line of each frame, innermost first; formatted only when a report needs it."""


def capture_stack(depth: int = 1) -> Stack:
    """The caller's stack without the frames that `is_inside` leaves out."""
    # traceback.extract_stack costs 30 times as much.
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    frames: list[tuple[CodeType, int]] = []
    known = _inside.get
    while frame is not None and len(frames) < STACK_LIMIT:
        code = frame.f_code
        inside = known(code)
        if inside is None:
            inside = is_inside(code)
        if not inside:
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


_inside: dict[CodeType, bool] = {}


def is_inside(code: CodeType) -> bool:
    """Whether code is left out of stacks: the runtime (not its tests), libraries, and drivers."""
    known = _inside.get(code)
    if known is None:
        name = code.co_filename
        is_test = Path(name).name.startswith("test_")
        is_runtime = name.startswith(_RT_FOLDER) and not is_test
        known = is_runtime or name in _drivers or name.startswith(_LIBRARIES)
        _inside[code] = known
    return known


_drivers: set[str] = set()


def hide_driver(path: str) -> None:
    """Leave a file out of stacks: one that only starts runs, in this process or another."""
    _drivers.add(path)


def site_of(stack: Stack) -> str:
    """Innermost frame as "path:line in function"."""
    return _format_frame(*stack[0]) if stack else "unknown"


def _format_frame(code: CodeType, line: int) -> str:
    path = code.co_filename.removeprefix(_ROOT)
    return f"{path}:{line} in {code.co_qualname}"


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a report.

    Attributes:
        actor: Stream or host thread.
        operation: Op, copy or host access.
        kind: "read" or "write".
        step: Number of frames taken when it was enqueued.
        sequence: Its place among all operations of the run.
        stack: "path:line in function", innermost first.
    """

    actor: str
    operation: str
    kind: str
    step: int
    sequence: int
    stack: tuple[str, ...]

    @property
    def site(self) -> str:
        """Where it was made."""
        return self.stack[0] if self.stack else "unknown"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding.

    Attributes:
        kind: For example UNORDERED-WRITE-READ; docs/races.md lists them.
        buffer: Name of the memory.
        rows: Rows it concerns, shortened.
        detail: What is wrong and what would put it right.
        first, second: The two accesses in the order they were enqueued; a rule about one access
            has no first.
        seed, policy: They make the same run again.
        count: Findings of this kind at this pair of sites; the first is shown.
    """

    kind: str
    buffer: str
    rows: str
    detail: str
    first: Access | None
    second: Access
    seed: int
    policy: str
    count: int = 1

    @property
    def site_a(self) -> str:
        """Site of the earlier access, or of the only one."""
        return (self.first or self.second).site

    @property
    def site_b(self) -> str:
        """Site of the later access."""
        return self.second.site

    def as_dict(self) -> dict[str, object]:
        """For JSON."""

        def side(access: Access | None) -> dict[str, object] | None:
            if access is None:
                return None
            return {
                "actor": access.actor,
                "operation": access.operation,
                "kind": access.kind,
                "step": access.step,
                "sequence": access.sequence,
                "stack": list(access.stack),
            }

        return {
            "kind": self.kind,
            "buffer": self.buffer,
            "rows": self.rows,
            "detail": self.detail,
            "site_a": self.site_a,
            "site_b": self.site_b,
            "first": side(self.first),
            "second": side(self.second),
            "seed": self.seed,
            "policy": self.policy,
            "count": self.count,
        }

    def __str__(self) -> str:
        lines = [f"{self.kind} {self.buffer}{self.rows}: {self.detail}"]
        for label, access in (("first", self.first), ("second", self.second)):
            if access is None:
                continue
            lines.append(
                f"  {label}: {access.kind} by {access.operation} on {access.actor}, "
                f"step {access.step}, operation {access.sequence}"
            )
            lines += [f"    {line}" for line in access.stack]
        lines.append(f"  replay: seed {self.seed}, policy {self.policy}; seen {self.count} times")
        return "\n".join(lines)


def format_stack(stack: Stack) -> tuple[str, ...]:
    """All frames as "path:line in function"."""
    return tuple(_format_frame(code, line) for code, line in stack)


def format_rows(rows: list[int]) -> str:
    """At most eight row numbers as "[1, 2, ...]"."""
    shown = ", ".join(str(row) for row in rows[:8])
    return f"[{shown}{', ...' if len(rows) > 8 else ''}]"  # noqa: PLR2004  as the docstring says
