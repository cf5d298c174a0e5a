"""Flags: those of the engine made from EngineConfig's fields, and those of sampling.

A new field of EngineConfig becomes a flag, a HEADRACE_* variable and a config file key by being
there; its help is its line in the class's docstring.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from headrace.cli.settings import DEFAULT
from headrace.config import EngineConfig
from headrace.errors import ConfigError

MODEL = Group("Model", sort_key=10)
SAMPLING = Group("Sampling", sort_key=20)
CAPACITY = Group("Memory and batch size", sort_key=30)
CACHE = Group("Prefix cache and state", sort_key=40)
SCHEDULING = Group("Scheduling and speculation", sort_key=50)
DEBUGGING = Group("Debugging", sort_key=60)

_GROUPS = {
    MODEL: (
        "model", "tokenizer", "served_model_name", "device", "dtype", "state_dtype", "kernels",
        "graphs",
    ),
    CAPACITY: (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
        "tensor_parallel_size", "rank_timeout", "block_size", "num_kv_blocks", "num_state_blocks",
        "max_waiting",
    ),
    CACHE: (
        "prefix_cache", "state_block_size", "checkpoint_retention", "max_pinned_share",
        "state_scheme", "replay_interval", "state_store", "state_store_memory",
        "state_store_disk", "state_store_step_bytes",
    ),
    SCHEDULING: (
        "batch_layout", "speculative", "grammar_backend", "async_scheduling", "deterministic",
        "seed",
    ),
    DEBUGGING: ("scan_grid", "check_invariants", "rt_backend"),
}  # fmt: skip
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_WITH_NEGATIVE = ("async_scheduling", "deterministic")


def documented_args(documented: type) -> dict[str, str]:
    """Read the Args section of a class's docstring: name to one line of help."""
    text = documented.__doc__ or ""
    _, _, args = text.partition("Args:\n")
    help_of: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        if not line.strip():
            break
        start = re.fullmatch(r" {8}(\w+): (.*)", line)
        if start:
            name = start.group(1)
            help_of[name] = start.group(2).strip()
        elif name:
            help_of[name] += " " + line.strip()
    return help_of


def _engine_flags() -> type[EngineConfig]:
    hints = get_type_hints(EngineConfig)
    help_of = documented_args(EngineConfig)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(EngineConfig):
        parameter = Parameter(
            group=_GROUP_OF.get(field.name, DEBUGGING),
            negative=None if field.name in _WITH_NEGATIVE else "",
        )
        fields.append((
            field.name,
            Annotated[hints[field.name], parameter],
            dataclasses.field(
                default=field.default, metadata={"help": help_of.get(field.name, "")}
            ),
        ))  # fmt: skip
    flags = dataclasses.make_dataclass(
        "EngineFlags", fields, bases=(EngineConfig,), frozen=True, kw_only=True
    )
    # cyclopts takes a class of the module "types" for a built-in without fields.
    flags.__module__ = __name__
    return flags


if TYPE_CHECKING:
    EngineFlags = EngineConfig
else:
    EngineFlags = _engine_flags()

Engine = Annotated[EngineFlags, Parameter(name="*")]
ConfigFile = Annotated[Path | None, Parameter(group=MODEL)]


def engine_config(flags: EngineConfig, *, positional_model: str | None = None) -> EngineConfig:
    """Turn parsed flags into the engine's configuration.

    Args:
        flags: What the command line gave, all layers applied.
        positional_model: The model named without a flag, if the command takes it so.

    Raises:
        ConfigError: Two different models are named.
    """
    values = {f.name: getattr(flags, f.name) for f in dataclasses.fields(EngineConfig)}
    if positional_model is not None:
        if flags.model not in (EngineConfig().model, positional_model):
            raise ConfigError(
                f"two models are named, {positional_model!r} and --model {flags.model!r}; keep one"
            )
        values["model"] = positional_model
    return EngineConfig(**values)


def sampling_seed(flags: EngineConfig, sources: dict[str, str] | None) -> int | None:
    """Return the seed of a request: --seed if it was given.

    A seed that nobody gave is the engine's business: it keys the noise of unseeded requests.
    """
    return None if (sources or {}).get("seed", DEFAULT) == DEFAULT else flags.seed


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen; None takes the checkpoint's generation_config.json."""

    max_tokens: Annotated[
        int | None,
        Parameter(
            group=SAMPLING, help="Most tokens of the answer; default: the checkpoint's, or 512."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Parameter(group=SAMPLING, help="0 is greedy; default: the checkpoint's."),
    ] = None
    top_p: Annotated[
        float | None, Parameter(group=SAMPLING, help="Share of probability to keep, in (0, 1].")
    ] = None
    top_k: Annotated[
        int | None, Parameter(group=SAMPLING, help="Likeliest tokens to keep; 0 keeps all.")
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(group=SAMPLING, help="Drop tokens below this share of the likeliest, in [0, 1]."),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            group=SAMPLING, negative="", consume_multiple=False, show_default=False,
            help="Text that ends the answer; may be repeated.",
        ),
    ] = ()

    def given(self) -> dict[str, Any]:
        """Return the flags that were given, as keyword arguments of SamplingParams."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}
