"""Only `headrace.rt` touches streams, events, pinned memory, device copies and kernel launches.

Usage: python tools/lint_rt.py [FOLDER ...]    (default: src/headrace)

Looks at the syntax tree of every file outside `headrace/rt`, tests aside, and says what it may
not do there. Host values are read (`.item()`, `.tolist()`) all day; the rule is about device
tensors, which are only reachable in functions that are given tensors: ops and what they call. A
line may be excused by `# lint-rt: REASON`, and the reason must be there.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

READ_BACKS = {"item", "tolist", "numpy"}
"""Methods that wait for the device if the value is a device tensor."""

DEVICE_COPIES = {"cpu", "cuda", "pin_memory", "record_stream"}
"""Methods that are never right here: copies, waits and pinned memory."""

TORCH_CUDA = {
    "Event",
    "CUDAGraph",
    "ExternalStream",
    "Stream",
    "current_stream",
    "default_stream",
    "graph",
    "make_graphed_callables",
    "set_stream",
    "stream",
    "synchronize",
}
"""Names of torch.cuda (and torch) that order device work."""

PRIVATE = {
    "backend_memory",
    "copy_to_device",
    "copy_to_host",
    "device_memory",
    "device_tensor",
    "host_memory",
    "memory_tensor",
    "poll_native",
    "release_memory",
    "run_op",
}
"""Attributes of the runtime that are for `headrace.rt` alone."""

LOADING = re.compile(r"(^|/)weights/|_weights\.py$")
"""Files that bring a model to its device before the first step: `.to(device)` is their work."""

EXCUSE = re.compile(r"#\s*lint-rt:\s*\S+")


@dataclass(frozen=True)
class Finding:
    """One forbidden form.

    Attributes:
        path, line: Where.
        message: What, and what to use instead.
    """

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Visitor(ast.NodeVisitor):
    """Collects forbidden forms of one file."""

    def __init__(self, *, may_use_raw: bool, is_loading: bool) -> None:
        self.found: list[tuple[int, str]] = []
        self._may_use_raw = may_use_raw
        self._is_loading = is_loading
        self._kernels: set[str] = set()
        self._has_tensors = [False]

    def note(self, node: ast.expr | ast.stmt, message: str) -> None:
        """Keep one finding."""
        self.found.append((node.lineno, message))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Remember kernels by their decorator, and whether tensors are about."""
        decorators = {_dotted(one).rpartition(".")[2] for one in node.decorator_list}
        if decorators & {"jit", "autotune", "heuristics"}:
            self._kernels.add(node.name)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [one.annotation for one in arguments if one.annotation is not None]
        is_given = any("Tensor" in ast.unparse(one) for one in annotations)
        self._has_tensors.append(self._has_tensors[-1] or is_given or "op" in decorators)
        self.generic_visit(node)
        self._has_tensors.pop()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Names taken out of torch.cuda escape the other rules."""
        if node.module in {"torch.cuda", "torch.cuda.graphs", "torch.cuda.streams"}:
            names = {alias.name for alias in node.names} & TORCH_CUDA
            for name in sorted(names):
                self.note(node, f"{name} of torch.cuda; use headrace.rt streams, events and graphs")
        if node.module == "headrace.rt.raw":
            self.note(node, "headrace.rt.raw is for the checker's mutants alone")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """torch.cuda.Stream and the like, and private parts of the runtime."""
        dotted = _dotted(node)
        head, _, last = dotted.rpartition(".")
        if last in TORCH_CUDA and (
            head.endswith("torch.cuda") or (head == "torch" and last in {"Event", "Stream"})
        ):
            self.note(node, f"{dotted}; use headrace.rt streams, events and graphs")
        if node.attr in PRIVATE and not self._may_use_raw:
            self.note(node, f".{node.attr} is for headrace.rt alone; pass views to a launch")
        if node.attr == "raw" and not self._may_use_raw and _is_runtime(node.value):
            self.note(node, ".raw is for the checker's mutants alone; use frames and tickets")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Copies, waits and launches."""
        for keyword in node.keywords:
            if keyword.arg == "non_blocking" and not _is_false(keyword.value):
                self.note(node, "non_blocking= copy; stage it in a frame or fetch a ticket")
            if keyword.arg == "pin_memory" and not _is_false(keyword.value):
                self.note(node, "pinned allocation; frames and tickets own pinned memory")
        function = node.func
        if isinstance(function, ast.Attribute):
            self._check_method(node, function)
        if isinstance(function, ast.Subscript):
            self._check_launch(node, function)
        self.generic_visit(node)

    def _check_method(self, node: ast.Call, function: ast.Attribute) -> None:
        name = function.attr
        if name in DEVICE_COPIES:
            self.note(node, f".{name}() waits for or copies to the device; stage or fetch with rt")
        if name in READ_BACKS and (self._has_tensors[-1] or _is_torch(function.value)):
            self.note(
                node, f".{name}() may wait for the device; fetch a ticket and read its result"
            )
        names_device = any(_names_device(argument) for argument in _arguments(node))
        if name == "to" and names_device and not self._is_loading:
            self.note(node, ".to(device) copies to or from the device; stage or fetch with rt")
        if name in {"poll", "query"} and not node.args:
            self.note(node, f".{name}() lets control flow depend on timing; wait instead")

    def _check_launch(self, node: ast.Call, function: ast.Subscript) -> None:
        name = _dotted(function.value)
        last = name.rpartition(".")[2]
        is_generic = last[:1].isupper() or last in {"dict", "frozenset", "list", "set", "tuple"}
        # kernel[grid](...): a subscript that is called. Generic classes and tables of
        # functions (a string or a name in the brackets of an upper-case table) are not.
        if last in self._kernels or (last.endswith("kernel") and not is_generic):
            self.note(
                node, f"{name}[grid](...) launches a kernel; wrap it in an op and launch that"
            )


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _names_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(":")[0] in {"cpu", "cuda"}
    return _dotted(node).rpartition(".")[2] == "device"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_runtime(node: ast.expr) -> bool:
    return _dotted(node).rpartition(".")[2] in {"rt", "runtime", "_runtime"}


def _is_torch(node: ast.expr) -> bool:
    """Whether a value plainly comes from torch: torch.something(...), indexed or not."""
    while isinstance(node, (ast.Subscript, ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def check_source(source: str, path: Path, *, may_use_raw: bool = False) -> list[Finding]:
    """Findings in one file's text."""
    lines = source.splitlines()
    is_loading = bool(LOADING.search(path.as_posix()))
    visitor = Visitor(may_use_raw=may_use_raw, is_loading=is_loading)
    visitor.visit(ast.parse(source, str(path)))
    return [
        Finding(path, line, message)
        for line, message in sorted(set(visitor.found))
        if not EXCUSE.search(lines[line - 1])
    ]


def check_tree(folder: Path) -> list[Finding]:
    """Findings in all files of a folder outside `headrace/rt`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.parts
        is_rt = "rt" in parts and parts[parts.index("rt") - 1] == "headrace"
        if is_rt or path.name.startswith(("test_", "conftest")):
            continue
        # Mutants take back what the safe interface would not let them do.
        may_use_raw = "check" in parts
        found += check_source(path.read_text(encoding="utf-8"), path, may_use_raw=may_use_raw)
    return found


def main(arguments: list[str]) -> int:
    """Print findings; 1 if there are any."""
    found = [one for name in arguments or ["src/headrace"] for one in check_tree(Path(name))]
    for one in found:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
