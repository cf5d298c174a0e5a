"""Compiling kernels for Hopper without a GPU."""

from __future__ import annotations

import pytest

from headrace.ops.aot import CompileError, KernelSpec, compile_kernel

pytest.importorskip("triton")


def test_a_kernel_that_does_not_compile_says_why() -> None:
    spec = KernelSpec(
        kernel="headrace.ops.state_columns.kernel:columns_kernel",
        signature={"pools": ["*fp32"]},
        constants={},
    )
    with pytest.raises(CompileError, match="no type for"):
        compile_kernel(spec)
