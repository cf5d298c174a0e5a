"""What a benchmark can be asked for.

Fields become flags of `headrace bench` and of `python -m headrace.bench`; their help is their line
in the docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Benchmarks of an engine in this process.

    Args:
        random_weights: A config.json; its model is made on the device with random weights.
        batch: Requests at once, several numbers with commas between them.
        prompt_tokens: Tokens of each prompt, the shared prefix not counted.
        output_tokens: Tokens to generate for each request.
        shared_prefix: Tokens that all prompts begin with; computed once before the clock starts.
        arrival_rate: Requests per second, at random times (Poisson); default: all at once.
        requests: Requests of a run with an arrival rate or a concurrency; default: 4 per batch.
        concurrency: Most unfinished requests at once; default: no limit.
        repeats: Measured runs; the median is reported.
        warmup_tokens: Output tokens of the run before them; default: as many as measured.
        temperature: 0 is greedy.
        forced_acceptance: Share of rows that keep each draft, as 0.8,0.64,0.512; results are then
            meaningless but the whole work of speculation is done.
        adaptive_drafts: Let the number of drafts follow the batch size.
        cold_start: Also measure a new process without caches until its first token.
        breakdown: Decode steps to profile, by launch and by kernel; 0 for none.
        trace: Write the profiled steps for Perfetto or chrome://tracing.
        copy_tb_s: The device's copy speed, bytes read and written, in TB/s; default: measured.
        matmul_tflops: The device's speed of matrix products in TFLOP/s; default: measured.
        json: Write all figures.
        plot: Draw tokens per second over batch size as SVG.
        compare: Two JSON files to compare instead of measuring.
    """

    random_weights: Path | None = None
    batch: str = "1"
    prompt_tokens: int = 128
    output_tokens: int = 129
    shared_prefix: int = 0
    arrival_rate: float | None = None
    requests: int | None = None
    concurrency: int | None = None
    repeats: int = 3
    warmup_tokens: int | None = None
    temperature: float = 0.0
    forced_acceptance: str = ""
    adaptive_drafts: bool = False
    cold_start: bool = False
    breakdown: int = 0
    trace: Path | None = None
    copy_tb_s: float | None = None
    matmul_tflops: float | None = None
    json: Path | None = None
    plot: Path | None = None
    compare: tuple[Path, Path] | None = None

    def __post_init__(self) -> None:
        _at_least_one(
            self, "prompt_tokens", "output_tokens", "repeats", "requests", "concurrency",
            "warmup_tokens",
        )
        _positive(self, "arrival_rate", "copy_tb_s", "matmul_tflops")
        _not_negative(self, "shared_prefix", "breakdown", "temperature")
        parse_batches(self.batch)
        parse_shares(self.forced_acceptance)

    @property
    def batches(self) -> tuple[int, ...]:
        """Requests at once, in the order given."""
        return parse_batches(self.batch)

    @property
    def shares(self) -> tuple[float, ...]:
        """Forced shares by place; empty if acceptance is real."""
        return parse_shares(self.forced_acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """A load for a server that runs already.

    Args:
        url: Where the server is.
        served_model: Name in requests; default: the first that the server lists.
        api_key: Shown to the server.
        requests: How many.
        prompt_tokens: Tokens of each prompt, the shared prefix not counted.
        output_tokens: Tokens to generate for each request.
        shared_prefix: Tokens that all prompts begin with.
        arrival_rate: Requests per second, at random times (Poisson); default: as fast as allowed.
        concurrency: Most unfinished requests at once; default: no limit.
        vocab_size: Prompts are random token ids below this.
        temperature: 0 is greedy.
        load_seed: Of prompts and arrival times; default: a fresh one, which is printed.
        timeout: Seconds for one request.
        json: Write all figures.
        plot: Draw tokens per second over batch size as SVG.
        compare: Two JSON files to compare instead of measuring.
    """

    url: str = "http://127.0.0.1:8000"
    served_model: str | None = None
    api_key: str | None = None
    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 64
    shared_prefix: int = 0
    arrival_rate: float | None = None
    concurrency: int | None = None
    vocab_size: int = 256
    temperature: float = 0.0
    load_seed: int | None = None
    timeout: float = 600.0
    json: Path | None = None
    plot: Path | None = None
    compare: tuple[Path, Path] | None = None

    def __post_init__(self) -> None:
        _at_least_one(
            self, "requests", "prompt_tokens", "output_tokens", "concurrency", "vocab_size"
        )
        _positive(self, "arrival_rate", "timeout")
        _not_negative(self, "shared_prefix", "temperature")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {self.url!r}; begin it with http:// or https://")


def parse_batches(text: str) -> tuple[int, ...]:
    """Read `1,8,32`.

    Raises:
        ConfigError: A part is no integer of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"batch is {text!r}; give integers of at least 1, as in 1,8,32")
    return tuple(int(part) for part in parts)


def parse_shares(text: str, *, name: str = "forced_acceptance") -> tuple[float, ...]:
    """Read `0.8,0.64,0.512`: the chance that drafts are kept up to each place, so not rising.

    Args:
        text: The shares; empty for none.
        name: Of the option, for errors.

    Raises:
        ConfigError: A part is no number in [0, 1], or larger than the one before it.
    """
    if not text.strip():
        return ()
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (-1.0,)
    falling = all(a >= b for a, b in pairwise(shares))
    if not falling or not all(0.0 <= share <= 1.0 for share in shares):
        raise ConfigError(
            f"{name} is {text!r}; give numbers in [0, 1] that do not rise, such as "
            "0.8,0.64,0.512: a draft can only be kept if those before it are"
        )
    return shares


def as_json(options: object) -> dict[str, Any]:
    """Options as JSON values, those about files of this run left out."""
    skipped = ("json", "plot", "compare", "trace", "api_key")
    values = {f.name: getattr(options, f.name) for f in fields(options)}  # type: ignore[arg-type]
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name not in skipped
    }


def documented(options: type) -> Mapping[str, str]:
    """Read the Args section of a class's docstring: field to its help."""
    _, _, args = (options.__doc__ or "").partition("Args:\n")
    help_of: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        text = line.strip()
        if line.startswith(" " * 8) and not line.startswith(" " * 9):
            name, _, text = text.partition(": ")
            help_of[name] = text
        elif name and text:
            help_of[name] += " " + text
    return help_of


def _given(options: object, names: tuple[str, ...]) -> list[tuple[str, float]]:
    values = [(name, getattr(options, name)) for name in names]
    return [(name, value) for name, value in values if value is not None]


def _at_least_one(options: object, *names: str) -> None:
    for name, value in _given(options, names):
        if value < 1:
            raise ConfigError(f"{name} is {value} but must be at least 1")


def _positive(options: object, *names: str) -> None:
    for name, value in _given(options, names):
        if not value > 0:
            raise ConfigError(f"{name} is {value} but must be above 0")


def _not_negative(options: object, *names: str) -> None:
    for name, value in _given(options, names):
        if value < 0:
            raise ConfigError(f"{name} is {value} but must not be below 0")
