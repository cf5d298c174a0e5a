"""What may be asked for, on both command lines."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.bench.__main__ import run_command
from headrace.bench.options import OfflineOptions, ServeOptions, documented, parse_shares
from headrace.bench.workload import arrival_times, percentiles, random_prompts
from headrace.cli.main import known_settings
from headrace.cli.main import run_command as run_cli
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABSENT = ("cyclopts", "fastapi", "msgspec", "httpx", "orjson", "pydantic", "rich", "starlette",
          "uvicorn", "yaml", "prometheus_client", "transformers")  # fmt: skip


@pytest.mark.parametrize("options", [OfflineOptions, ServeOptions])
def test_every_option_has_help_and_is_a_flag_of_both(options: type[Any]) -> None:
    known = known_settings()
    for field in dataclasses.fields(options):
        assert documented(options).get(field.name), field.name
        assert field.name in known


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": "1,x"}, "batch is '1,x'; give integers"),
        ({"batch": "0"}, "at least 1"),
        ({"forced_acceptance": "0.5,0.6"}, "do not rise"),
        ({"forced_acceptance": "1.5"}, r"in \[0, 1\]"),
        ({"arrival_rate": 0.0}, "arrival_rate is 0.0 but must be above 0"),
        ({"repeats": 0}, "repeats is 0 but must be at least 1"),
        ({"shared_prefix": -1}, "shared_prefix is -1"),
    ],
)
def test_wrong_options_are_refused_with_value_and_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OfflineOptions(**values)


def test_url_needs_a_scheme() -> None:
    with pytest.raises(ConfigError, match="begin it with http"):
        ServeOptions(url="localhost:8000")


def test_shares_are_read() -> None:
    assert parse_shares("0.8, 0.64,0.512") == (0.8, 0.64, 0.512)
    assert parse_shares("") == ()


@pytest.mark.parametrize("run", [run_command, run_cli], ids=["module", "command line"])
def test_wrong_use_ends_with_2(
    run: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["throughput", "--batch", "none"]
    assert run(["bench", *arguments] if run is run_cli else arguments) == 2
    assert "batch is 'none'" in capsys.readouterr().err


def test_help_of_the_command_loads_no_torch() -> None:
    program = (
        "import sys, contextlib, io\n"
        "from headrace.cli.main import run_command\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    run_command(['bench', 'throughput', '--help'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_offline_benches_need_only_the_core_libraries(shape: Path) -> None:
    program = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
from headrace.bench.__main__ import run_command
sys.exit(run_command(sys.argv[1:]))
"""
    command = ["throughput", "--random-weights", str(shape), "--prompt-tokens", "4", "--repeats",
               "1", "--output-tokens", "3", "--speculative", "none", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "decode" in done.stdout


def test_arrivals_are_poisson_at_the_rate_asked_for() -> None:
    rng = np.random.default_rng()
    gaps = np.diff(arrival_times(rng, 4000, 50.0))

    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)
    assert arrival_times(rng, 3, None) == [0.0, 0.0, 0.0]


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    prompts = random_prompts(np.random.default_rng(), 8, 32, 1000, [7, 8, 9])

    assert all(prompt[:3] == [7, 8, 9] and len(prompt) == 35 for prompt in prompts)
    assert len({tuple(prompt[3:]) for prompt in prompts}) == 8


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    assert percentiles([1.0, 3.0])["p50"] == 2.0
