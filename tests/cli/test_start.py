"""What a user waits for before anything happens."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "fastapi", "uvicorn", "tokenizers")


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the names of all modules it loaded."""
    program = f"""
import contextlib, io, sys
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
{code}
print("\\n".join(sys.modules))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "tokens", [["--help"], ["run", "--help"], ["serve", "--help"], ["--version"]], ids=" ".join
)
def test_help_loads_nothing_heavy(tokens: list[str]) -> None:
    code = f"    from headrace.cli.main import run_command\n    run_command({tokens!r})"

    assert not modules_after(code) & set(HEAVY)


def test_importing_the_package_loads_no_torch() -> None:
    loaded = modules_after(
        "    import headrace\n"
        "    headrace.SamplingParams(temperature=0)\n"
        "    headrace.EngineConfig()"
    )

    assert "headrace" in loaded
    assert not loaded & set(HEAVY)


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import headrace  # noqa: PLC0415

    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        headrace.LLMM  # noqa: B018
