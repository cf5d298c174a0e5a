"""The README's table of families says what the registry gives."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.ops import gated_delta_decode

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:  # noqa: ANN401
    spec = importlib.util.spec_from_file_location("family_table", ROOT / "tools/family_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("references_only")
def test_the_table_of_families_is_what_the_registry_gives(tool: Any) -> None:  # noqa: ANN401
    # Which kernels are reached, not what they compute: the references will do, without the
    # interpreter.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tool.with_table(text) == text, "run python tools/family_table.py"


def test_kernels_on_the_way_are_seen(tool: Any) -> None:  # noqa: ANN401
    def run() -> None:
        with contextlib.suppress(TypeError, AttributeError):
            gated_delta_decode.gated_delta_decode(*[None] * 10)  # type: ignore[arg-type]

    assert tool.kernels_of(run) == {"gated_delta_decode"}
