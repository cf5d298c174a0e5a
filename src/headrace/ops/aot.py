"""Compiles kernels for Hopper (sm_90a) on a machine without a GPU, and reads what came out.

Compiling needs Triton's interpreter off and Triton looks only once, so it happens in a process of
its own: tests call `compile_kernel` or `compile_kernels`, which run ``python -m headrace.ops.aot``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json: TypeAlias = Any
"""What JSON can hold; tuples of a signature travel as lists."""

CAPABILITY = 90
"""Compute capability of Hopper; Triton compiles for sm_90a."""

_ALIGNMENT = 16
"""Numbers and addresses that are multiples of this are compiled for apart."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that one program can have on Hopper."""


class CompileError(RuntimeError):
    """A kernel does not compile for Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """What a kernel is compiled for.

    Attributes:
        kernel: "module:name".
        signature: Type of each parameter, as Triton spells it: "*bf16", "fp32", "i64", "constexpr",
            or a list of types for a tuple.
        constants: Values of the constexpr parameters, and None for pointers that are not given.
        aligned: Pointers and numbers that are multiples of 16.
        options: num_warps and the like.
    """

    kernel: str
    signature: Mapping[str, Json]
    constants: Mapping[str, Json]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says of a kernel.

    Attributes:
        registers: For each thread.
        spill_bytes: Stores and loads of spilled registers, by the assembler's count.
        shared_bytes: For each program.
        tensor_core: Warp-group matrix instructions (wgmma).
        instructions: Number of each instruction of the machine code, where it can be disassembled.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core: int
    instructions: Mapping[str, int]


def spec_of(kernel: Any, args: Sequence[object], options: Mapping[str, Any]) -> KernelSpec:  # noqa: ANN401
    """Describe a launch as the JIT would compile it.

    Args:
        kernel: Function made by `triton.jit`.
        args: What it is launched with; tensors may be on the meta device.
        options: Constexpr parameters and Triton's options, by name.
    """
    # Where the interpreter is on, `triton.jit` keeps what it was given.
    general = getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: options[name] for name in kernel.arg_names if name in options}
    constants |= {name: None for name, value in given.items() if value is None}
    signature: dict[str, Json] = dict.fromkeys(constants, "constexpr")
    aligned = []
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            is_aligned = value.storage_offset() * value.element_size() % _ALIGNMENT == 0
        elif isinstance(value, float):
            signature[name], is_aligned = "fp32", False
        else:
            assert isinstance(value, int), f"{name} is a {type(value).__name__}"
            if value == 1 and name not in general:
                signature[name], constants[name] = "constexpr", 1
                continue
            signature[name] = "i32" if value < 1 << 31 else "i64"
            is_aligned = value % _ALIGNMENT == 0 and name not in general
        if is_aligned:
            aligned.append(name)
    return KernelSpec(
        kernel=f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        signature=signature,
        constants=constants,
        aligned=tuple(aligned),
        options={name: value for name, value in options.items() if name not in kernel.arg_names},
    )


def compile_kernel(spec: KernelSpec, *, timeout_s: float = 240) -> Compiled:
    """Compile a kernel in a process of its own.

    Raises:
        CompileError: With the compiler's message.
    """
    return compile_kernels([spec], timeout_s=timeout_s)[0]


def compile_kernels(specs: Sequence[KernelSpec], *, timeout_s: float = 240) -> list[Compiled]:
    """Compile kernels in one process of their own: most of the time is its start.

    Raises:
        CompileError: With the compiler's message.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace.ops.aot"],
        input=json.dumps([asdict(spec) for spec in specs]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        names = ", ".join(spec.kernel for spec in specs)
        raise CompileError(f"{names} does not compile:\n{done.stderr[-4000:]}")
    return [Compiled(**made) for made in json.loads(done.stdout)]


def _compile(spec: Json) -> Compiled:
    # In this process alone: a test's process has the interpreter on.
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    module, name = spec["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature = {key: _tuples(value) for key, value in spec["signature"].items()}
    constants = {key: _tuples(value) for key, value in _constants(kernel, spec).items()}
    attributes: dict[tuple[int, ...], Json] = {}
    for place, key in enumerate(kernel.arg_names):
        if key in spec["aligned"]:
            paths = [(place,)]
            if isinstance(signature[key], tuple):
                paths = [(place, member) for member in range(len(signature[key]))]  # type: ignore[misc]
            attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", CAPABILITY, 32)
    compiled = triton.compile(
        source, target=target, options={"enable_fp_fusion": True, **spec["options"]}
    )
    text = compiled.asm["ptx"]
    registers, spills = _assemble(text)
    return Compiled(
        registers=registers,
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        tensor_core=text.count("wgmma.mma_async"),
        instructions=_disassemble(compiled.asm["cubin"]),
    )


def _constants(kernel: Json, spec: Json) -> dict[str, Json]:
    missing = set(kernel.arg_names) - set(spec["signature"])
    if missing:
        msg = f"{spec['kernel']}: no type for {sorted(missing)}"
        raise ValueError(msg)
    return {key: spec["constants"][key] for key in kernel.arg_names if key in spec["constants"]}


def _tuples(value: Json) -> Json:
    return tuple(_tuples(member) for member in value) if isinstance(value, list) else value


def _tools() -> Path:
    import triton  # noqa: PLC0415

    assert triton.__file__ is not None
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _assemble(text: str) -> tuple[int, int]:
    """Registers and spilled bytes, by the bundled assembler."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        # Newer Triton writes a PTX version that only the assembler for newer chips reads.
        for name in ("ptxas", "ptxas-blackwell"):
            tool = _tools() / name
            if not tool.exists():
                continue
            command = [str(tool), "-v", f"-arch=sm_{CAPABILITY}a", str(source), "-o", f"{folder}/o"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode == 0:
                used = re.search(r"Used (\d+) registers", done.stderr)
                spills = re.findall(r"(\d+) bytes spill", done.stderr)
                assert used is not None, done.stderr
                return int(used[1]), sum(map(int, spills))
            problems.append(done.stderr)
    raise RuntimeError("\n".join(problems) or f"no ptxas in {_tools()}")


def _disassemble(binary: bytes) -> dict[str, int]:
    """Number of each instruction; empty where Triton brings no disassembler."""
    tool = _tools() / "cuobjdump"
    if not tool.exists():
        return {}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        done = subprocess.run(  # noqa: S603  Triton's own tool
            [str(tool), "-sass", str(path)], capture_output=True, text=True, check=False
        )
    for line in done.stdout.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", line)
        if found:
            counts[found[1]] = counts.get(found[1], 0) + 1
    return counts


if __name__ == "__main__":
    sys.stdout.write(json.dumps([asdict(_compile(spec)) for spec in json.load(sys.stdin)]))
