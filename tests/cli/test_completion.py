"""What a shell is told of the command line."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from headrace.cli.main import build_app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_know_commands_and_engine_flags(shell: str) -> None:
    script = build_app().generate_completion(shell=shell)  # type: ignore[arg-type]
    for word in ("serve", "throughput", "max-num-seqs", "request-timeout"):
        assert word in script


def test_bash_completes_a_command(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = tmp_path / "headrace"
    script.write_text(build_app().generate_completion(shell="bash"))
    asked = (
        f"source {script}; COMP_WORDS=(headrace ser); COMP_CWORD=1; COMP_LINE='headrace ser'; "
        '_headrace; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", asked], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["serve"]
