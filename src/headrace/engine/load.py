"""From a config to what an engine is made of: model, sizes, scheduler, worker.

"auto" values are resolved here, once. What does not fit is an error at start that says what to
lower, never a failure in the middle of traffic.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from headrace import rt, text
from headrace.config import launched_rank
from headrace.engine.block_pool import BlockPool
from headrace.engine.draft_policy import DraftPolicy
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.scheduler import Scheduler, SchedulerLimits
from headrace.engine.state_store.context import context_of
from headrace.engine.state_store.folder import Folder
from headrace.engine.state_store.prefixes import StoredPrefixes
from headrace.engine.state_store.store import StateStore
from headrace.engine.state_store.wire import Wire
from headrace.errors import ConfigError
from headrace.grammar.xgrammar_backend import check_installed
from headrace.models.batch import ROW_TILE
from headrace.models.config import ModelConfig
from headrace.models.registry import check_parts, model_class, tensor_cuts
from headrace.models.shard import WHOLE, Shard
from headrace.parallel.launched import lead_launched
from headrace.parallel.leader import Leader
from headrace.rt.kernels import has_triton, is_interpreted
from headrace.text.generation import GenerationDefaults
from headrace.weights import (
    Shards,
    StoredWeights,
    quantization_of,
    read_config,
    weights_fingerprint,
)
from headrace.weights.resolve import resolve_model
from headrace.worker.buffers import WorkerSizes
from headrace.worker.graphs import logits_bytes
from headrace.worker.state_scheme import Columns, Replay
from headrace.worker.worker import Worker

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.models.batch import Kernels, StateGroupSpec, StateTensorSpec
    from headrace.parallel.steps import Others
    from headrace.text import ChatTemplate, Tokenizer
    from headrace.weights import BlockScales

_LOG = logging.getLogger(__name__)
_CPU_POOL_BYTES = 2 * 2**30
_GPU_STEP_TOKENS, _CPU_STEP_TOKENS = 8192, 1024
_CHECKPOINTS_PER_SEQUENCE = 2
_STORE_MEMORY_BYTES, _STORE_DISK_BYTES = 2**30, 16 * 2**30
_GPU_STORE_STEP_BYTES, _CPU_STORE_STEP_BYTES = 32 * 2**20, 8 * 2**20
_STORE_FRAMES = 5
"""Rows on their way to or from the state store that the device has room for, in steps."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Parsed `--speculative`.

    Attributes:
        method: none, mtp, ngram, draft or scripted.
        num_drafts: k.
        path: Folder of a draft model.
    """

    method: str
    num_drafts: int
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a device, in bytes; of a CPU, what pools may take.

    Attributes:
        total: All of it.
        free: What nobody uses yet.
    """

    total: int
    free: int

    @classmethod
    def of(cls, device: torch.device) -> Memory:
        """Ask a device that is there."""
        if device.type == "cpu":
            return cls(total=_CPU_POOL_BYTES, free=_CPU_POOL_BYTES)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total=total, free=free)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything an engine holds, resolved and allocated.

    Attributes:
        others: The other ranks, where this process is rank 0 of several.
    """

    config: EngineConfig
    model_config: ModelConfig
    model: Any
    runtime: rt.Runtime
    scheduler: Scheduler
    worker: Worker
    sizes: WorkerSizes
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation_defaults: GenerationDefaults
    max_model_len: int
    name: str
    depth: int
    others: Others | None = None


class Ranks(Protocol):
    """A rank's place among those that share a model."""

    @property
    def group(self) -> rt.Group | None:
        """Of all ranks."""

    def least(self, value: int) -> int:
        """Agree on the smallest of the numbers that the ranks have; each calls this in turn."""


def load_parts(
    config: EngineConfig,
    *,
    model: Any = None,  # noqa: ANN401 - any class of headrace.models
    draft_model: Any = None,  # noqa: ANN401
    runtime: rt.Runtime | None = None,
    has_text: bool = True,
    fingerprints: tuple[str, ...] = (),
    ranks: Ranks | None = None,
) -> Parts:
    """Load a model and build an engine around it.

    Where several devices share it, this process is rank 0 and starts the others, unless it is told
    that it is one of them.

    Args:
        config: Settings, "auto" allowed.
        model: A model that is already loaded (tests); else config.model is loaded.
        draft_model: Likewise for `--speculative draft:PATH:K`.
        runtime: A runtime that exists already (the checker's).
        has_text: Whether prompts or answers will be text; without, neither the tokenizer nor the
            chat template is read, and their libraries are not needed.
        fingerprints: Names of the weights, and of the draft model's, for the state store; made of
            the folders where the models are loaded from those.
        ranks: This rank's place among others, where it is not 0.

    Raises:
        ConfigError: Settings contradict each other or do not fit this machine.
        ModelError: The model folder cannot be used.
        RankError: The process of another rank ended, or did not begin.
    """
    folder = resolve_model(config.model) if model is None else None
    stored = Checkpoint.of_folder(folder, config.speculative) if folder is not None else None
    model_config = stored.config if stored is not None else model.config
    given, config = config, _resolve(config, model_config)
    leader = None
    if stored is not None and ranks is None and config.tensor_parallel_size > 1:
        ranks = leader = _lead(replace(given, device=config.device))
    try:
        parts = _load(
            config, given.kernels, folder, stored, model_config, model=model,
            draft_model=draft_model, runtime=runtime, has_text=has_text, ranks=ranks,
            fingerprints=fingerprints,
        )
        if leader is not None:
            leader.wait_until_ready()
    except BaseException:
        if leader is not None:
            leader.stop()
        raise
    return replace(parts, others=leader)


def _lead(config: EngineConfig) -> Leader:
    """Become rank 0 of processes that torchrun started, or that are started here."""
    launched = launched_rank()
    return Leader.start(config) if launched is None else lead_launched(config, launched)


def _load(
    config: EngineConfig,
    wanted: Literal["auto", "torch", "triton"],
    folder: Path | None,
    stored: Checkpoint | None,
    model_config: ModelConfig,
    *,
    model: Any,  # noqa: ANN401
    draft_model: Any,  # noqa: ANN401
    runtime: rt.Runtime | None,
    has_text: bool,
    ranks: Ranks | None,
    fingerprints: tuple[str, ...],
) -> Parts:
    """Load and build with resolved settings; `wanted` are the kernels as they were asked for."""
    device = torch.device(config.device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The models that run on a CPU are small; a second thread costs more than it brings, and
        # results are promised for a fixed number of threads.
        torch.set_num_threads(1)
    speculation = parse_speculative(config.speculative, model_config)
    if stored is not None:
        group = None if ranks is None else ranks.group
        model = load_model(stored, config, device, WHOLE if group is None else Shard.of(group))
    if speculation.path is not None and draft_model is None:
        draft_model = _load_draft(speculation.path, model_config, config, device)
    draft_kernels: Kernels = "torch"
    if draft_model is not None:
        # "auto" is decided for each model. Drafts change no output, whatever their bits are.
        loose = replace(config, kernels=wanted, deterministic=False)
        draft_kernels = resolve_kernels(loose, draft_model.config)
    has_kernels = config.kernels == "triton" and (
        draft_model is None or draft_kernels == "triton"
    )
    is_captured = resolve_graphs(config, has_kernels=has_kernels)
    config = replace(config, graphs="on" if is_captured else "off")
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    own = model_config.max_position_embeddings
    # Without attention there are no positions to leave behind.
    if max_model_len > own and model.num_kv_layers:
        _LOG.warning(
            "max_model_len is %d but the model was made for %d tokens; answers beyond those may be "
            "worth nothing", max_model_len, own,
        )
    scheme = _scheme(config, speculation, max_model_len, device, model.state_groups(0))
    memory = None
    if ranks is not None:
        # Pools have the same sizes on all ranks.
        memory = Memory.of(device)
        memory = replace(memory, free=ranks.least(memory.free))
    sizes, max_model_len = _sizes(
        config, model, draft_model, scheme, speculation.num_drafts, max_model_len, device, memory
    )
    if runtime is None:
        runtime = rt.Runtime.create(config.rt_backend, device=config.device, seed=config.seed)
    if has_store(config) and folder is not None and not fingerprints:
        fingerprints = (weights_fingerprint(folder),)
        if speculation.path is not None:
            fingerprints += (weights_fingerprint(resolve_model(speculation.path)),)
    text_folder = folder if has_text else None
    tokenizer = load_tokenizer(config, text_folder) if has_text else None
    return assemble(
        config, model, model_config, runtime, scheme, sizes, speculation,
        draft_model=draft_model,
        draft_kernels=draft_kernels,
        tokenizer=tokenizer,
        chat_template=load_template(text_folder, tokenizer),
        generation_defaults=(
            GenerationDefaults.from_folder(folder) if folder is not None else
            GenerationDefaults(eos_token_ids=model_config.eos_token_ids)
        ),
        max_model_len=max_model_len,
        name=config.served_model_name or config.model,
        fingerprints=fingerprints,
    )


def has_store(config: EngineConfig) -> bool:
    """Whether prefixes are kept anywhere but on the device."""
    return config.state_store is not None or bool(config.state_store_memory)


def assemble(
    config: EngineConfig,
    model: Any,  # noqa: ANN401
    model_config: ModelConfig,
    runtime: rt.Runtime,
    scheme: Columns | Replay,
    sizes: WorkerSizes,
    speculation: Speculation,
    *,
    draft_model: Any = None,  # noqa: ANN401
    draft_kernels: Kernels = "torch",
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate | None,
    generation_defaults: GenerationDefaults,
    max_model_len: int,
    name: str,
    fingerprints: tuple[str, ...] = (),
) -> Parts:
    """Allocate and connect; every value is resolved."""
    depth = 2 if config.async_scheduling else 1
    assert config.kernels != "auto", "settings must be resolved"
    assert config.graphs != "auto", "settings must be resolved"
    is_fixed = bool(config.deterministic) and config.kernels == "triton"
    try:
        worker = Worker(
            model=model,
            runtime=runtime,
            sizes=sizes,
            scheme=scheme,
            layout=config.batch_layout,
            depth=depth,
            kv_dtype=model.dtype,
            grid=config.scan_grid,
            kernels=("fixed" if is_fixed else config.kernels, draft_kernels),
            drafter=speculation.method,
            draft_model=draft_model,
            graphs=config.graphs == "on",
            store_step_bytes=_store_step_bytes(config) if has_store(config) else None,
        )
    except RuntimeError as error:
        # A CPU's allocator has no class of its own for this.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"no memory for the pools and buffers of max_num_seqs {sizes.max_num_seqs}, "
            f"{sizes.num_kv_blocks} KV blocks and {sizes.num_state_blocks} state blocks per group; "
            "lower max_num_seqs, num_kv_blocks or num_state_blocks"
        ) from error
    kv_pool = BlockPool("kv", sizes.num_kv_blocks)
    groups = model.state_groups(sizes.max_drafts)
    state_pools = tuple(BlockPool(f"state.{g}", sizes.num_state_blocks) for g in range(len(groups)))
    cache = PrefixCache(
        kv_pool=kv_pool,
        state_pools=state_pools,
        block_size=config.block_size,
        unit=scheme.unit,
        is_enabled=config.prefix_cache == "align",
        is_bitwise=bool(config.deterministic),
        max_held=_max_held(config, sizes, scheme, depth),
    )
    if cache.is_enabled:
        _LOG.info("prefixes of %d tokens and more can be cached", scheme.unit)
    scheduler = Scheduler(
        limits=SchedulerLimits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.max_tokens,
            block_size=config.block_size,
            grid=config.scan_grid,
            retention=config.checkpoint_retention,
        ),
        scheme=scheme,
        kv_pool=kv_pool,
        state_pools=state_pools,
        cache=cache,
        num_draft_tokens=speculation.num_drafts,
        policy=_policy(config, speculation),
        vocab_size=sizes.vocab_size,
        rewrites_last=speculation.method == "mtp",
        stored=_stored_prefixes(config, runtime, worker, cache, fingerprints),
    )
    return Parts(
        config=config,
        model_config=model_config,
        model=model,
        runtime=runtime,
        scheduler=scheduler,
        worker=worker,
        sizes=sizes,
        tokenizer=tokenizer,
        chat_template=chat_template,
        generation_defaults=generation_defaults,
        max_model_len=max_model_len,
        name=name,
        depth=depth,
    )


def _stored_prefixes(
    config: EngineConfig,
    runtime: rt.Runtime,
    worker: Worker,
    cache: PrefixCache,
    fingerprints: tuple[str, ...],
) -> StoredPrefixes | None:
    """Open the state store, if there is to be one."""
    transfers = worker.transfers
    if transfers is None:
        return None
    if not fingerprints:
        raise ConfigError(
            "a state store needs to know the weights and this model has no folder; give load_parts "
            "their fingerprints"
        )
    context = context_of(config, fingerprints, transfers.layouts)
    folder = None
    memory, disk = store_limits(config)
    if config.state_store is not None:
        folder = Folder(Path(config.state_store), context, disk)
        _LOG.info("prefixes are kept in %s: %d bytes of %d", folder.path, folder.num_bytes, disk)
    wire = Wire(context, transfers.layouts)
    store = StateStore(runtime, wire, memory_bytes=memory, folder=folder)
    return StoredPrefixes(store, cache, transfers.layouts, transfers.max_pieces)


def store_limits(config: EngineConfig) -> tuple[int, int]:
    """Bytes that the state store may take in memory and on disk."""
    memory, disk = config.state_store_memory, config.state_store_disk
    if config.state_store is None:
        return memory or 0, 0
    return (
        _STORE_MEMORY_BYTES if memory is None else memory,
        _STORE_DISK_BYTES if disk is None else disk,
    )


def _beside_pools(
    config: EngineConfig, model: Any, max_drafts: int, column_bytes: int, state_bytes: int  # noqa: ANN401
) -> int:
    """Bytes of device memory that graphs and the state store take.

    Args:
        config: Settings.
        model: The served model.
        max_drafts: Of a row.
        column_bytes: KV of one state column.
        state_bytes: Of a state block of every group.
    """
    total = 0
    if config.graphs == "on":
        rows, vocab_size = config.max_num_seqs, model.config.vocab_size
        # Where more is done to logits than to compare them, that is done to a copy in float32.
        total += rows * (1 + max_drafts) * vocab_size * torch.float32.itemsize
        total += logits_bytes(rows, vocab_size, model.dtype)
    if has_store(config):
        # A piece on its way has room however large it is.
        step_bytes = _store_step_bytes(config)
        total += _STORE_FRAMES * (max(step_bytes, column_bytes) + max(step_bytes, state_bytes))
    return total


def _store_step_bytes(config: EngineConfig) -> int:
    """Most bytes of a kind that a step brings to the state store."""
    if config.state_store_step_bytes is not None:
        return config.state_store_step_bytes
    return _GPU_STORE_STEP_BYTES if config.device == "cuda" else _CPU_STORE_STEP_BYTES


def _max_held(
    config: EngineConfig, sizes: WorkerSizes, scheme: Columns | Replay, depth: int
) -> tuple[int, int]:
    """Most KV blocks and state blocks that may be spared from eviction.

    What is left always holds one sequence of the longest length, which is what progress rests on.
    """
    kv, states = sizes.num_kv_blocks - 1, sizes.num_state_blocks - 1
    one_sequence = scheme.max_blocks() + 1 + (depth - 1) * (1 + sizes.max_drafts)
    share = config.max_pinned_share
    return (
        max(0, min(int(share * kv), kv - sizes.table_width)),
        max(0, min(int(share * states), states - one_sequence)),
    )


def _policy(config: EngineConfig, speculation: Speculation) -> DraftPolicy | None:
    """Let k follow batch size and acceptance; a script decides for itself."""
    if not speculation.num_drafts or speculation.method == "scripted":
        return None
    # H200: 760 TFLOP/s over 4.2 TB/s at 2 operations and 2 bytes a weight. On a CPU products are
    # made in tiles of ROW_TILE rows, which all cost the same.
    ridge = 180.0 if config.device == "cuda" else 2.0 * ROW_TILE
    cost = {"ngram": 0.02, "mtp": 0.15, "draft": 0.3}[speculation.method]
    return DraftPolicy(speculation.num_drafts, ridge_tokens=ridge, drafter_cost=cost)


def parse_speculative(text: str, model_config: ModelConfig) -> Speculation:
    """Parse `--speculative`.

    Raises:
        ConfigError: Unknown method, a number out of range, or the model has no MTP head.
    """
    if text == "auto":
        has_head = model_config.num_mtp_layers > 0
        return Speculation(method="mtp", num_drafts=1) if has_head else _NO_SPECULATION
    if text == "none":
        return _NO_SPECULATION
    method, _, rest = text.partition(":")
    path = None
    if method == "draft":
        path, _, rest = rest.rpartition(":")
    if method not in ("mtp", "ngram", "draft", "scripted"):
        raise ConfigError(
            f"speculative is {text!r}; choose auto, none, mtp:K, ngram:K or draft:PATH:K"
        )
    if not rest.isdigit() or not 1 <= int(rest) <= _MAX_DRAFTS:
        raise ConfigError(f"speculative is {text!r}; K must be in 1..{_MAX_DRAFTS}")
    if method == "mtp" and not model_config.num_mtp_layers:
        raise ConfigError(
            f"speculative is {text!r} but the checkpoint has no MTP layers; use none or ngram:K"
        )
    return Speculation(method=method, num_drafts=int(rest), path=path)


_NO_SPECULATION = Speculation(method="none", num_drafts=0)
_MAX_DRAFTS = 7


def _resolve(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace every "auto" and check what can be checked before anything is allocated."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda but torch sees no CUDA device; use --device cpu")
    size = config.tensor_parallel_size
    if device == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size is {size} but torch sees {torch.cuda.device_count()} CUDA "
            "devices; use at most so many"
        )
    return resolve_on(device, config, model_config)


def resolve_on(
    device: Literal["cpu", "cuda"], config: EngineConfig, model_config: ModelConfig
) -> EngineConfig:
    """Replace every "auto" as it is meant on a device, which need not be in this machine.

    Args:
        device: Where the engine is to run.
        config: Settings; its own device does not count.
        model_config: The model.

    Raises:
        ConfigError: Settings contradict each other, or the device cannot honour them.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else _checkpoint_dtype(model_config)
    state_dtype = "float32" if config.state_dtype == "auto" else config.state_dtype
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = device == "cpu" and dtype == "float32" and config.kernels != "triton"
    _check_ranks(config, model_config)
    if has_store(config) and config.prefix_cache == "none":
        raise ConfigError(
            "a state store keeps what the prefix cache has, which is off; use prefix_cache align, "
            "or leave state_store and state_store_memory out"
        )
    if config.grammar_backend == "xgrammar":
        check_installed()
    _check_numbers(config)
    backend = config.rt_backend
    if backend == "auto":
        backend = "cuda" if device == "cuda" else "cpu"
    config = replace(
        config,
        device=device,
        dtype=dtype,
        state_dtype=state_dtype,
        deterministic=deterministic,
        rt_backend=backend,
        grammar_backend=(
            "llguidance" if config.grammar_backend == "auto" else config.grammar_backend
        ),
    )
    asked = config.kernels
    config = replace(config, kernels=resolve_kernels(config, model_config))
    if config.deterministic:
        check_deterministic(config, model_config, asked)
    has_drafts = parse_speculative(config.speculative, model_config).num_drafts > 0
    return replace(config, state_scheme=resolve_scheme(config, has_drafts=has_drafts))


def _check_ranks(config: EngineConfig, model_config: ModelConfig) -> None:
    """Refuse a number of devices that cannot share the model."""
    size = config.tensor_parallel_size
    if size > 1 and has_store(config):
        raise ConfigError(
            f"tensor_parallel_size is {size} and there is a state store, which keeps the states of "
            "one device; leave state_store and state_store_memory out, or use one device"
        )
    if config.rank_timeout <= 0.0:
        raise ConfigError(f"rank_timeout is {config.rank_timeout:g} but must be above 0 seconds")
    if model_config.num_shards == 1:
        check_parts(model_config, size)
    elif model_config.num_shards != size:
        raise ConfigError(
            f"tensor_parallel_size is {size} but the model that is given is one of "
            f"{model_config.num_shards} parts"
        )


def resolve_scheme(config: EngineConfig, *, has_drafts: bool) -> Literal["columns", "replay"]:
    """Which scheme keeps states, by what was measured to be faster (decision 0019).

    With kernels a state is written sooner than it is brought forward again, but where each draft
    would write it once more.

    Args:
        config: Settings, of which all but `state_scheme` are resolved.
        has_drafts: Whether steps verify drafts.
    """
    if config.state_scheme != "auto":
        return config.state_scheme
    if config.kernels != "triton" or config.device == "cpu" or config.replay_interval is not None:
        return "replay"
    return "replay" if has_drafts else "columns"


def check_deterministic(config: EngineConfig, model_config: ModelConfig, asked: str) -> None:
    """Refuse what cannot give the same bits whatever else runs.

    On a CPU PyTorch operations can, and so can the kernels of some families. On a CUDA device those
    kernels alone can: libraries there choose the order of sums by the number of rows.

    Args:
        config: Settings, of which all but `state_scheme` are resolved.
        model_config: The model.
        asked: The setting `kernels` before it was resolved.

    Raises:
        ConfigError: With the remedy.
    """
    remedy = "leave deterministic out"
    if config.kernels == "torch":
        if config.device == "cpu":
            return
        obstacle = "kernels is 'torch'"
        if asked != "torch":
            found = _kernel_obstacle(config, model_config)
            assert found is not None, "kernels can be used and are not"
            obstacle = found[0]
        raise ConfigError(
            f"deterministic is set on a CUDA device, where kernels alone give the same bits, but "
            f"{obstacle}; {remedy}, or run on the CPU in float32"
        )
    fixed_obstacle = model_class(model_config).fixed_obstacle(model_config)
    if fixed_obstacle is not None:
        raise ConfigError(
            f"deterministic is set but {fixed_obstacle}; {remedy}, or run on the CPU in float32 "
            "with kernels torch"
        )
    if config.device == "cuda" and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"deterministic is set and tensor_parallel_size is {config.tensor_parallel_size}, but "
            f"a library chooses the order in which it adds what GPUs give; use one, or {remedy}"
        )
    if config.state_dtype != "float32":
        raise ConfigError(
            f"deterministic is set but state_dtype is {config.state_dtype}, and the bits of states "
            f"that are rounded depend on when they are stored; use state_dtype float32, or {remedy}"
        )


def resolve_kernels(
    config: EngineConfig, model_config: ModelConfig
) -> Literal["torch", "triton"]:
    """Decide what computes a model's generated tokens.

    Args:
        config: Settings, of which all but `kernels` are resolved.
        model_config: The model, or the draft model.

    Raises:
        ConfigError: The kernels are asked for by name and cannot be used.
    """
    if config.kernels not in ("auto", "torch", "triton"):
        raise ConfigError(f"kernels is {config.kernels!r}; choose auto, torch or triton")
    is_auto = config.kernels == "auto"
    if config.kernels == "torch" or (is_auto and config.device == "cpu"):
        return "torch"
    found = _kernel_obstacle(config, model_config)
    if found is None:
        return "triton"
    obstacle, remedy = found
    if not is_auto:
        raise ConfigError(f"kernels is 'triton' but {obstacle}; {remedy}")
    _LOG.info("generated tokens are computed by PyTorch operations: %s", obstacle)
    return "torch"


def resolve_graphs(config: EngineConfig, *, has_kernels: bool) -> bool:
    """Decide whether steps of generating rows alone are captured.

    Args:
        config: Settings, of which all but `graphs` are resolved.
        has_kernels: Whether kernels compute the generated tokens of all its models.

    Raises:
        ConfigError: Graphs are asked for by name and cannot be had.
    """
    if config.graphs not in ("auto", "on", "off"):
        raise ConfigError(f"graphs is {config.graphs!r}; choose auto, on or off")
    is_cuda = config.device == "cuda"
    if config.graphs == "on" and is_cuda and not has_kernels:
        # Not all of those operations can be captured, and their cost grows with the room of a step.
        raise ConfigError(
            "graphs is 'on' but PyTorch operations compute generated tokens here, and only steps "
            "of kernels are captured on a CUDA device; use graphs auto or off, or a model that "
            "kernels serve"
        )
    return config.graphs == "on" or (config.graphs == "auto" and is_cuda and has_kernels)


def _kernel_obstacle(config: EngineConfig, model_config: ModelConfig) -> tuple[str, str] | None:
    """Why the kernels cannot be used and what to change, or None if they can."""
    if not has_triton():
        return "triton is not installed", "install it, or use kernels torch"
    if config.device == "cpu" and not is_interpreted():
        return (
            "the device is a CPU, where kernels run in Triton's interpreter only",
            "use kernels torch, or for tests set TRITON_INTERPRET=1 before the start",
        )
    size = config.tensor_parallel_size
    if model_config.num_shards == 1 and size > 1 and model_config.counts is not None:
        # What counts is what a rank runs.
        model_config = model_config.part(size)
    obstacle = model_class(model_config).kernel_obstacle(model_config)
    return None if obstacle is None else (obstacle, "use kernels auto or torch")


def _checkpoint_dtype(model_config: ModelConfig) -> Any:  # noqa: ANN401
    return "float32" if model_config.dtype == "float32" else "bfloat16"


def _check_numbers(config: EngineConfig) -> None:
    grid, unit, block = config.scan_grid, config.state_block_size, config.block_size
    if unit < 1 or unit % grid:
        raise ConfigError(
            f"state_block_size is {unit} but must be a multiple of {grid}, the scan grid; "
            f"use {max(grid, -(-unit // grid) * grid)}"
        )
    if block < 1 or unit % block:
        raise ConfigError(f"block_size is {block} but must divide state_block_size {unit}; use 16")
    if config.rt_backend not in ("auto", *rt.BACKENDS):
        raise ConfigError(
            f"rt_backend is {config.rt_backend!r}; choose auto or one of {', '.join(rt.BACKENDS)}"
        )
    if config.max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {config.max_num_seqs} but must be at least 1")
    budget = config.max_num_batched_tokens
    if budget is not None and budget < grid:
        raise ConfigError(
            f"max_num_batched_tokens is {budget} but a chunk of a prompt needs {grid}, the scan "
            f"grid; raise it to at least {grid}"
        )
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization} but must be in (0, 1]"
        )
    if not 0.0 <= config.max_pinned_share <= 1.0:
        raise ConfigError(
            f"max_pinned_share is {config.max_pinned_share} but must be in [0, 1]"
        )
    if config.max_model_len is not None and config.max_model_len < 2:  # noqa: PLR2004
        raise ConfigError(f"max_model_len is {config.max_model_len} but must be at least 2")
    retention = config.checkpoint_retention
    is_every = retention.startswith("every:") and retention.removeprefix("every:").isdigit()
    if retention not in ("latest", "all") and not (is_every and int(retention[6:]) > 0):
        raise ConfigError(
            f"checkpoint_retention is {retention!r}; choose latest, all or every:N with N > 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model folder whose heads have been read and whose data has not.

    Attributes:
        config: What config.json says, less an MTP layer that the files lack.
        shards: Where each tensor lies.
        quantization: How FP8 matrices are scaled, if it has them.
    """

    config: ModelConfig
    shards: Shards
    quantization: BlockScales | None

    @classmethod
    def of_folder(cls, folder: Path, speculative: str = "auto") -> Checkpoint:
        """Read config.json and the heads of the weight files.

        Args:
            folder: The model.
            speculative: The setting: with `mtp:K` a missing MTP layer is an error.

        Raises:
            ConfigError: MTP drafts are asked for and the files hold no MTP layer.
            ModelError: The folder cannot be used.
        """
        raw = read_config(folder)
        model_config = ModelConfig.from_dict(raw)
        shards = Shards.of_folder(folder)
        if model_config.num_mtp_layers and not any(n.startswith("mtp.") for n in shards.tensors):
            # Tools that know the model without its MTP layer drop the layer when they save.
            message = (
                f"{folder} was saved without the MTP layer that its config.json announces (no "
                "tensor mtp.*)"
            )
            if speculative.startswith("mtp"):
                raise ConfigError(
                    f"speculative is {speculative!r} but {message}; fetch the published "
                    "checkpoint, or use none, ngram:K or draft:PATH:K"
                )
            _LOG.warning("%s; it is served without MTP drafts", message)
            model_config = replace(model_config, num_mtp_layers=0)
        return cls(config=model_config, shards=shards, quantization=quantization_of(raw))


def load_model(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device, shard: Shard = WHOLE
) -> Any:  # noqa: ANN401
    """Build a model, or a rank's part of one, from a folder, tensor by tensor.

    Args:
        checkpoint: The model's folder.
        config: Resolved settings: dtype and state_dtype are no "auto".
        device: Where the weights go.
        shard: The part of the model that is wanted; no more than that is kept.

    Returns:
        A `headrace.models.model.HybridModel`.

    Raises:
        WeightsError: A tensor is missing, unexpected, damaged or of the wrong shape.
    """
    model_config = checkpoint.config
    cls = model_class(model_config)
    dtype = _DTYPES[config.dtype]
    expected = cls.expected_tensors(model_config, tuple(checkpoint.shards.tensors))
    ignore = ["model.visual.*"]
    if not model_config.num_mtp_layers:
        ignore.append("mtp.*")
    if model_config.tie_word_embeddings:
        ignore += ["lm_head.weight", "lm_head.weight_scale_inv"]
    weights = StoredWeights(
        checkpoint.shards,
        expected,
        device=device,
        ignore=ignore,
        quantization=checkpoint.quantization,
        cuts=tensor_cuts(model_config, shard, checkpoint.shards.tensors),
    )
    if shard.size == 1:
        return cls.from_weights(model_config, weights, dtype, config.state_dtype)
    own = model_config.part(shard.size)
    return cls.from_weights(own, weights, dtype, config.state_dtype, shard=shard)


def _load_draft(
    path: str, model_config: ModelConfig, config: EngineConfig, device: torch.device
) -> Any:  # noqa: ANN401
    draft = Checkpoint.of_folder(resolve_model(path))
    if draft.config.vocab_size != model_config.vocab_size:
        raise ConfigError(
            f"the draft model {path!r} has {draft.config.vocab_size} vocabulary entries but the "
            f"model has {model_config.vocab_size}; choose a draft model of the same tokenizer"
        )
    return load_model(draft, config, device)


def _scheme(
    config: EngineConfig,
    speculation: Speculation,
    max_model_len: int,
    device: torch.device,
    groups: tuple[StateGroupSpec, ...],
) -> Columns | Replay:
    unit = config.state_block_size
    if config.prefix_cache == "none":
        # Without checkpoints one column holds the whole sequence.
        unit = -(-(max_model_len + speculation.num_drafts) // config.scan_grid) * config.scan_grid
    drafts = speculation.num_drafts
    if unit <= drafts:
        raise ConfigError(f"state_block_size {unit} must exceed the {drafts} drafts of a step")
    if config.state_scheme == "columns":
        return Columns(unit=unit, max_drafts=drafts)
    interval = config.replay_interval
    if interval is None:
        # On a CPU applying pending tokens again costs more than the write it saves.
        interval = 1
        if device.type != "cpu":
            interval = min((group.replay_interval for group in groups), default=16)
        while interval <= drafts:
            interval *= 2
    if interval <= drafts or unit % interval:
        raise ConfigError(
            f"replay_interval is {interval} but must exceed the {drafts} drafts of a step and "
            f"divide {unit}"
        )
    return Replay(unit=unit, max_drafts=drafts, interval=interval)


def _sizes(
    config: EngineConfig,
    model: Any,  # noqa: ANN401
    draft_model: Any,  # noqa: ANN401
    scheme: Columns | Replay,
    max_drafts: int,
    max_model_len: int,
    device: torch.device,
    memory: Memory | None = None,
) -> tuple[WorkerSizes, int]:
    """How many blocks each pool gets, from what is free, or the error that says what to lower."""
    block = config.block_size
    models = [model] if draft_model is None else [model, draft_model]
    model_config = model.config
    kv_bytes = sum(_kv_block_bytes(each, block) for each in models)
    groups = [group for each in models for group in each.state_groups(max_drafts)]
    state_bytes = sum(_state_block_bytes(group) for group in groups)
    running = config.max_num_seqs * scheme.max_blocks()
    wanted_states = 1 + running + _CHECKPOINTS_PER_SEQUENCE * config.max_num_seqs
    blocks_per_sequence = -(-(max_model_len + max_drafts) // block) + 1
    most_kv = 1 + config.max_num_seqs * blocks_per_sequence
    budget = _pool_budget(config, model, device, memory)
    if device.type != "cpu":
        entry = sum(_bytes(group.ring, len(group.layers)) for group in groups)
        if isinstance(scheme, Replay):
            budget -= (config.max_num_seqs + 1) * scheme.ring_size * entry
        column_bytes = kv_bytes * scheme.unit // block
        budget -= _beside_pools(config, model, max_drafts, column_bytes, state_bytes)
        budget = max(0, budget)
    state_budget = budget // 2
    if not any(each.num_kv_layers for each in models):
        # Blocks of token ids weigh next to nothing: what they leave is for states.
        state_budget = max(state_budget, budget - most_kv * kv_bytes)
    num_states = config.num_state_blocks or wanted_states
    if config.num_state_blocks is None and state_bytes * num_states > state_budget:
        num_states = max(scheme.max_blocks() + 4, state_budget // max(1, state_bytes))
    if config.num_kv_blocks is not None:
        num_kv = config.num_kv_blocks
    else:
        left = max(0, budget - num_states * state_bytes)
        num_kv = min(most_kv, left // max(1, kv_bytes))
    if num_kv - 1 < blocks_per_sequence:
        fits = (num_kv - 2) * block - max_drafts
        if config.max_model_len is not None or fits < config.scan_grid:
            remedies = [f"lower max_model_len to {fits}"] if fits > 1 else []
            if config.num_kv_blocks is not None:
                remedies.append(f"raise num_kv_blocks to {blocks_per_sequence + 1} or more")
            else:
                remedies.append("give the pool more memory")
            raise ConfigError(
                f"one sequence of max_model_len {max_model_len} needs {blocks_per_sequence} KV "
                f"blocks but the pool has {num_kv - 1}; {', or '.join(remedies)}"
            )
        _LOG.warning(
            "max_model_len is %d, as memory has no room for one sequence of the model's own %d; "
            "give the pool more memory for longer ones", fits, max_model_len,
        )
        max_model_len = fits
    if num_states - 1 < scheme.max_blocks() + 1:
        raise ConfigError(
            f"num_state_blocks is {num_states} but one sequence needs {scheme.max_blocks() + 1} "
            "and the null block; raise it, or lower the number of drafts"
        )
    sizes = WorkerSizes(
        max_num_seqs=config.max_num_seqs,
        max_tokens=_step_budget(config, max_drafts),
        max_drafts=max_drafts,
        max_model_len=max_model_len,
        block_size=block,
        num_kv_blocks=num_kv,
        num_state_blocks=num_states,
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
    )
    return sizes, max_model_len


def _step_budget(config: EngineConfig, max_drafts: int) -> int:
    """Most tokens of a step, on the device that was chosen."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if config.device == "cuda":
        return _GPU_STEP_TOKENS
    # A CPU takes a second for some thousands, in which nobody gets a token. Half of a step at least
    # is left to prompts when all rows verify all their drafts.
    return max(_CPU_STEP_TOKENS, 2 * config.max_num_seqs * (1 + max_drafts), config.scan_grid)


def _pool_budget(
    config: EngineConfig,
    model: Any,  # noqa: ANN401
    device: torch.device,
    memory: Memory | None,
) -> int:
    memory = memory or Memory.of(device)
    if device.type == "cpu":
        return memory.free
    free, total = memory.free, memory.total
    step = (config.max_num_batched_tokens or _GPU_STEP_TOKENS) * model.config.hidden_size * 64
    return int(min(free, total * config.gpu_memory_utilization - (total - free)) - step)


def _kv_block_bytes(model: Any, block: int) -> int:  # noqa: ANN401
    per_token = model.num_kv_layers * model.config.kv_width
    kv_bytes = int(per_token * block * torch.empty((), dtype=model.dtype).element_size())
    # Every block keeps its token ids too: all that there is of a model without attention.
    return kv_bytes + block * torch.int64.itemsize


def _state_block_bytes(group: StateGroupSpec) -> int:
    return _bytes(group.state, len(group.layers))


def _bytes(tensors: tuple[StateTensorSpec, ...], layers: int) -> int:
    """Bytes of one block, or of one ring entry, in all layers of a group."""
    sizes = (math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in tensors)
    return layers * sum(sizes)


def load_tokenizer(config: EngineConfig, folder: Path | None) -> Tokenizer | None:
    """The tokenizer of a model folder, or the one that the config names instead."""
    if config.tokenizer is not None:
        return text.Tokenizer.from_folder(config.tokenizer)
    return text.Tokenizer.from_folder_if_present(folder) if folder is not None else None


def load_template(folder: Path | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template of a model folder, if it has one."""
    if folder is None:
        return None
    special = None if tokenizer is None else tokenizer.special_tokens
    return text.ChatTemplate.from_folder(folder, special_tokens=special)
