"""Answers from damaged caches: how much of a model's accuracy hangs on each of them.

Between two steps, right after a prompt has been computed and before anything is made of it, the
sequence's own blocks are overwritten: with zeros, or with what another request had there. The hot
path knows nothing of this: the damage is one more launch on its stream. Every sequence is hurt
once, at the boundary of its answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from headrace import rt
from headrace.engine.block_pool import NULL_BLOCK
from headrace.errors import ConfigError
from headrace.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from headrace.config import EngineConfig
    from headrace.engine.engine import Engine
    from headrace.engine.sequence import Sequence
    from headrace.outputs import RequestOutput

Damaged = Literal["state", "conv", "kv"]
"""Recurrent states, convolution windows, or keys and values."""
How = Literal["zero", "swap"]
"""Erased, or replaced by another request's."""

# One that ended with its first token would be gone before its caches are looked at.
_TWO_TOKENS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
_KIND_OF = {"state": "recurrent_state", "conv": "conv_window"}


@rt.op(role="damage", pool=rt.ReadWrite)
def zero_blocks(*, pool: Tensor, blocks: tuple[int, ...], layer: int | None) -> None:
    """Fill blocks with zeros.

    Args:
        pool: [layers, blocks, ...].
        blocks: Which.
        layer: In which layer of the pool; None is all.
    """
    part = pool if layer is None else pool.narrow(0, layer, 1)
    for block in blocks:
        part.select(1, block).zero_()


@rt.op(role="damage", source=rt.Read, target=rt.ReadWrite)
def copy_blocks(
    *,
    source: Tensor,
    target: Tensor,
    pairs: tuple[tuple[int, int], ...],
    layer: int | None,
) -> None:
    """Copy blocks from one pool to another.

    Args:
        source: [layers, blocks, ...].
        target: The same, of any number of blocks.
        pairs: Source block and target block of each copy.
        layer: In which layer of the pools; None is all.
    """
    if layer is not None:
        source, target = source.narrow(0, layer, 1), target.narrow(0, layer, 1)
    for taken, given in pairs:
        target.select(1, given).copy_(source.select(1, taken))


def damageable(config: EngineConfig) -> EngineConfig:
    """Change settings so that a prompt's end falls between two steps and its blocks are its own.

    Raises:
        ConfigError: Several devices share the model.
    """
    _check_one_device(config)
    return replace(config, async_scheduling=False, prefix_cache="none")


def _check_one_device(config: EngineConfig) -> None:
    """Refuse several devices: the others' parts of the caches are out of reach and would stay."""
    size = config.tensor_parallel_size
    if size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but damage reaches the caches of one device only; "
            "use tensor_parallel_size 1, or leave damage out"
        )


def damaged_answers(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    what: Damaged,
    *,
    layer: int | None = None,
    how: How = "zero",
) -> list[str]:
    """Answer prompts as `damaged_outputs` does.

    Returns:
        The answers' texts, in order.
    """
    outputs = damaged_outputs(engine, prompts, params, what, layer=layer, how=how)
    return [output.outputs[0].text for output in outputs]


def damaged_outputs(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    what: Damaged,
    *,
    layer: int | None = None,
    how: How = "zero",
) -> list[RequestOutput]:
    """Answer prompts together, the caches of each damaged before its second token.

    The first token comes from the same step as the prompt's end; no cache is read between them.

    Args:
        engine: Without requests, and with settings from `damageable`.
        prompts: Token ids.
        params: How to sample.
        what: Which caches to damage.
        layer: Of which layer of the model; None is every layer, those of an MTP head included.
        how: "zero" erases them; with "swap" each sequence gets those of the one whose prompt ended
            before it, the first those of the last prompt, which is answered alone beforehand.

    Returns:
        The answers, in order.

    Raises:
        ConfigError: `what` or `how` is unknown, the layer has no such cache, there is nobody to
            swap with, several devices share the model, or the engine runs ahead or shares blocks.
    """
    for name, value, kinds in (("damage", what, Damaged), ("how", how, How)):
        if value not in get_args(kinds):
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(get_args(kinds))}")
    _check_one_device(engine.config)
    if engine.parts.depth != 1 or engine.config.prefix_cache != "none":
        raise ConfigError(
            "damage at the start of an answer needs async_scheduling off and prefix_cache none"
        )
    memories = _memories(engine, what, layer)
    if how == "zero":
        return _answer(engine, prompts, params, lambda seq: _zero(engine, memories, seq))
    if len(prompts) < 2:  # noqa: PLR2004 (a request and another)
        raise ConfigError(f"swapping needs two prompts or more, not {len(prompts)}")
    exchange = _Exchange(engine, memories)
    try:
        _answer(engine, prompts[-1:], _TWO_TOKENS, exchange.keep)
        return _answer(engine, prompts, params, exchange.swap)
    finally:
        exchange.close()


def _answer(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    hurt: Callable[[Sequence], None],
) -> list[RequestOutput]:
    """Answer prompts; call `hurt` with each sequence at the start of its answer."""
    whole = replace(params, output_kind=OutputKind.FINAL_ONLY)
    names = [f"damaged-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, whole)
    finished: dict[str, RequestOutput] = {}
    done: set[tuple[int, int]] = set()
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        for seq in engine.scheduler.running:
            # A preempted sequence computes its prompt again and is hurt again: another life.
            mark = (seq.seq_id, seq.life)
            if mark not in done and _is_answering(seq):
                done.add(mark)
                hurt(seq)
    return [finished[name] for name in names]


def _is_answering(seq: Sequence) -> bool:
    return seq.num_output_tokens > 0 and seq.num_computed_tokens >= seq.num_prompt_tokens


class _Memory:
    """One pool of a cache, or one layer of it, and a sequence's blocks in it.

    Args:
        engine: Whose.
        buffer: The pool, [layers, blocks, ...].
        layer: Place of the layer in the pool; None is all of them.
        group: State group; None for keys and values.
    """

    def __init__(
        self, engine: Engine, buffer: rt.Buffer, layer: int | None, group: int | None
    ) -> None:
        self.buffer, self.layer, self._group = buffer, layer, group
        self._block_size = engine.parts.sizes.block_size
        self._state_unit = engine.scheduler.scheme.unit
        self.max_held = 1 if group is not None else engine.parts.sizes.table_width

    def blocks(self, seq: Sequence) -> tuple[int, ...]:
        """All blocks of a sequence."""
        table = seq.kv_blocks if self._group is None else seq.state_tables[self._group]
        return tuple(block for block in table if block != NULL_BLOCK)

    def content(self, seq: Sequence) -> tuple[int, ...]:
        """The blocks that hold what the sequence has computed."""
        if self._group is not None:
            # Without a prefix cache all states of a sequence are in its first column.
            assert seq.num_prompt_tokens <= self._state_unit, f"{seq.num_prompt_tokens=}"
            return (seq.state_tables[self._group][0],)
        # A block that is not full has slots that nobody wrote.
        return tuple(seq.kv_blocks[: max(1, seq.num_prompt_tokens // self._block_size)])


def _memories(engine: Engine, what: Damaged, layer: int | None) -> list[_Memory]:
    """Find the pools of a kind of cache.

    Raises:
        ConfigError: The layer has no such cache.
    """
    pools = engine.worker.pools
    found: list[tuple[rt.Buffer, int | None, dict[int, int]]]
    if what == "kv":
        layers = engine.parts.model_config.attention_layers
        places = {number: place for place, number in enumerate(layers)}
        found = [(buffer, None, places) for buffer in (pools.k, pools.v)]
    else:
        groups = engine.parts.model.state_groups(engine.parts.sizes.max_drafts)
        found = [
            (buffer, index, {number: place for place, number in enumerate(groups[index].layers)})
            for index, buffers in enumerate(pools.states)
            for buffer in buffers.values()
            if buffer.kind == _KIND_OF[what]
        ]
    if layer is None:
        return [_Memory(engine, buffer, None, group) for buffer, group, _ in found]
    chosen = [
        _Memory(engine, buffer, places[layer], group)
        for buffer, group, places in found
        if layer in places
    ]
    if not chosen:
        having = sorted({number for _, _, places in found for number in places})
        listed = ", ".join(map(str, having)) or "none"
        raise ConfigError(f"layer {layer} has no {what}; layers that have it: {listed}")
    return chosen


def _zero(engine: Engine, memories: list[_Memory], seq: Sequence) -> None:
    runtime = engine.parts.runtime
    for memory in memories:
        blocks = memory.blocks(seq)
        view = memory.buffer.rows(read=blocks, write=blocks)
        stream = runtime.stream("compute")
        runtime.launch(zero_blocks, stream, pool=view, blocks=blocks, layer=memory.layer)


class _Exchange:
    """Copies of what the newest sequence had, for the next one to get.

    Args:
        engine: Whose.
        memories: What is exchanged.
    """

    def __init__(self, engine: Engine, memories: list[_Memory]) -> None:
        self._runtime = engine.parts.runtime
        self._memories = memories
        self._count = 0
        # Two, so that a sequence's own blocks are kept before another's come over them.
        self._held = [
            [
                self._runtime.alloc(
                    f"damage.{index}.{memory.buffer.name}",
                    (memory.buffer.shape[0], memory.max_held, *memory.buffer.shape[2:]),
                    memory.buffer.dtype,
                    row_dim=1,
                )
                for memory in memories
            ]
            for index in range(2)
        ]
        self._num_held = [[0] * len(memories) for _ in range(2)]

    def keep(self, seq: Sequence) -> None:
        """Remember a sequence's blocks."""
        side = self._count % 2
        for index, memory in enumerate(self._memories):
            content = memory.content(seq)
            self._num_held[side][index] = len(content)
            held = self._held[side][index]
            pairs = tuple((block, at) for at, block in enumerate(content))
            self._copy(memory.buffer, held, pairs, memory.layer)
        self._count += 1

    def swap(self, seq: Sequence) -> None:
        """Remember a sequence's blocks, and give it those remembered before."""
        self.keep(seq)
        side = self._count % 2
        for index, memory in enumerate(self._memories):
            # Where there are fewer, they come again, so that nothing of its own is left.
            count = self._num_held[side][index]
            pairs = tuple((at % count, block) for at, block in enumerate(memory.blocks(seq)))
            self._copy(self._held[side][index], memory.buffer, pairs, memory.layer)

    def close(self) -> None:
        """Give the memory back."""
        for buffers in self._held:
            for buffer in buffers:
                self._runtime.free(buffer)

    def _copy(
        self,
        source: rt.Buffer,
        target: rt.Buffer,
        pairs: tuple[tuple[int, int], ...],
        layer: int | None,
    ) -> None:
        taken, given = ([pair[side] for pair in pairs] for side in (0, 1))
        self._runtime.launch(
            copy_blocks,
            self._runtime.stream("compute"),
            source=source.rows(read=taken),
            target=target.rows(read=given, write=given),
            pairs=pairs,
            layer=layer,
        )
