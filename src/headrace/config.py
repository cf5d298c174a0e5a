"""Every setting of the engine, parsed once into a frozen value; the only reader of the environment.

Precedence: defaults, then HEADRACE_* variables and config file as the command line resolves them,
then flags or keyword arguments. "auto" values are resolved by `resolve`, which returns a new value.
"""

from __future__ import annotations

import functools
import os
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX = "HEADRACE_"

GRID = 64
"""Tokens between two points of the absolute scan grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; names equal the command line's flags.

    Args:
        model: "demo" (the shipped model), a folder, or a hub id.
        tokenizer: Folder of the tokenizer if not the model's own.
        served_model_name: Name that clients use; None takes `model`.
        device: auto, cpu or cuda.
        dtype: Compute dtype: auto, float32 or bfloat16.
        state_dtype: Dtype of recurrent state: auto, float32 or bfloat16.
        kernels: What computes generated tokens: auto, torch (PyTorch operations) or triton (fused
            kernels; then norms, gates and attention of prompts too). auto takes the kernels on a
            CUDA device where there are some for the model.
        graphs: Capture steps of generating sequences alone and replay them: auto, on or off. auto
            is on on a CUDA device where kernels compute generated tokens.
        max_model_len: Most tokens in a sequence, prompt and output; None takes the model's own.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most tokens in one step; None means 8192 on a GPU and 1024 on a CPU
            (more for many sequences with drafts): all that generate wait for a step's prompts.
        gpu_memory_utilization: Share of the device's memory to use, in (0, 1].
        tensor_parallel_size: Devices that share each layer, with a process for each.
        rank_timeout: Seconds that one of those processes may keep the others waiting; then all of
            them end. Starting may take 300, if that is more.
        block_size: Tokens per KV block.
        num_kv_blocks: KV blocks in the pool, null block included; None sizes it from memory.
        num_state_blocks: State blocks per group, null block included; None sizes it.
        prefix_cache: none, or align (checkpoints on multiples of state_block_size).
        state_block_size: Tokens per state column, a multiple of 64 (tests may lower scan_grid).
        scan_grid: Tokens between absolute scan points; 64 outside tests.
        checkpoint_retention: latest, every:N or all.
        max_pinned_share: Most of each pool that requests may spare from eviction, in [0, 1].
        state_store: Folder in which prefixes outlive the process; processes of one machine may
            share it. None keeps no files.
        state_store_memory: Bytes of host memory for prefixes that the device had to give up; None
            means 1 GiB with state_store and none without.
        state_store_disk: Most bytes of the files in state_store, of all models together; None
            means 16 GiB.
        state_store_step_bytes: Most bytes of KV, and of states, that a step brings to the store or
            takes from it; None means 32 MiB on a GPU and 8 MiB on a CPU.
        batch_layout: slots or compact.
        state_scheme: auto, columns or replay; auto takes what was measured to be faster.
        replay_interval: Tokens between base writes of the replay scheme; None picks by device.
        speculative: auto, none, mtp:K, ngram:K, draft:PATH:K (tests also: scripted:K).
        grammar_backend: Library of grammars: auto, llguidance or xgrammar; auto is llguidance.
            xgrammar takes fewer forms, and calls of tools run on llguidance all the same.
        async_scheduling: Prepare step n+1 while step n runs.
        deterministic: Bitwise equal results; None means on for CPU float32, off elsewhere and
            with kernels triton. True on a GPU takes kernels of one shape, and is refused for models
            that have none.
        seed: Seed of requests that bring none.
        max_waiting: Most waiting sequences before a server answers 429.
        check_invariants: Verify pools and tables after every step (tests, debugging).
        rt_backend: auto, cpu, cuda, sim or cuda_checked.
    """

    model: str = "demo"
    tokenizer: str | None = None
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["auto", "torch", "triton"] = "auto"
    graphs: Literal["auto", "on", "off"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    rank_timeout: float = 300.0
    block_size: int = 16
    num_kv_blocks: int | None = None
    num_state_blocks: int | None = None
    prefix_cache: Literal["none", "align"] = "align"
    state_block_size: int = GRID
    scan_grid: int = GRID
    checkpoint_retention: str = "latest"
    max_pinned_share: float = 0.5
    state_store: str | None = None
    state_store_memory: int | None = None
    state_store_disk: int | None = None
    state_store_step_bytes: int | None = None
    batch_layout: Literal["slots", "compact"] = "slots"
    state_scheme: Literal["auto", "columns", "replay"] = "auto"
    replay_interval: int | None = None
    speculative: str = "auto"
    grammar_backend: Literal["auto", "llguidance", "xgrammar"] = "auto"
    async_scheduling: bool = True
    deterministic: bool | None = None
    seed: int = 0
    max_waiting: int = 4096
    check_invariants: bool = False
    rt_backend: str = "auto"

    def __post_init__(self) -> None:
        """Check types and lower bounds: what else a value must fit is known with the model.

        Raises:
            ConfigError: A value is of the wrong type, or is none of those there are.
        """
        for name in ("model", "tokenizer", "state_store"):
            path: object = getattr(self, name)
            if isinstance(path, os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        for name, allowed in _allowed().items():
            _check(name, getattr(self, name), allowed)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value} but must be at least {least}")


_LEAST = {
    "tensor_parallel_size": 1, "num_kv_blocks": 1, "num_state_blocks": 1, "scan_grid": 1,
    "max_waiting": 1, "state_store_memory": 0, "state_store_disk": 1, "state_store_step_bytes": 1,
}  # fmt: skip
_KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"), int: ((int,), "an integer"), float: ((int, float), "a number"),
    bool: ((bool,), "True or False"), type(None): ((type(None),), "None"),
}


@functools.cache
def _allowed() -> dict[str, tuple[object, ...]]:
    """Each setting's types: one, or the members of a union, or a Literal."""
    hints = get_type_hints(EngineConfig)
    return {
        name: get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for name, hint in hints.items()
    }


def _check(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value of none of the allowed types; True is no number here."""
    for one in allowed:
        if get_origin(one) is Literal:
            choices = get_args(one)
            if not (isinstance(value, str) and value in choices):
                raise ConfigError(
                    f"{name} is {value!r}; choose {', '.join(choices[:-1])} or {choices[-1]}"
                )
            return
        if isinstance(value, _KINDS[one][0]) and (one is bool or not isinstance(value, bool)):
            return
    words = " or ".join(_KINDS[one][1] for one in allowed)
    raise ConfigError(f"{name} is {value!r:.200} but must be {words}")


def environment_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read the HEADRACE_* variables: setting in lower case to its text.

    Args:
        environ: Variables to read instead of the process's own.
    """
    variables = os.environ if environ is None else environ
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """What a launcher of several processes says to one of them.

    Attributes:
        rank: Of this process, 0 .. size - 1.
        size: Processes.
        local_size: Those of them on this machine.
    """

    rank: int
    size: int
    local_size: int


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Which process of several this is under `torchrun`; None without.

    Args:
        environ: Variables to read instead of the process's own.
    """
    variables = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    return LaunchedRank(
        rank=int(variables["RANK"]),
        size=int(variables["WORLD_SIZE"]),
        local_size=int(variables["LOCAL_WORLD_SIZE"]),
    )


def user_state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for what the command line remembers of its user, as the XDG rules have it.

    Args:
        environ: Variables to read instead of the process's own.
    """
    given = (os.environ if environ is None else environ).get("XDG_STATE_HOME")
    base = Path(given) if given else Path.home() / ".local" / "state"
    return base / "headrace"
