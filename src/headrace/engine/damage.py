"""Answers from damaged caches: how much of a model's accuracy hangs on each of them.

Between two steps, right after a prompt has been computed and before anything is made of it, the
sequence's own blocks are zeroed in every layer. The hot path knows nothing of this: the damage is
one more launch on its stream. Every sequence is hurt once, at the boundary of its answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from headrace import rt
from headrace.engine.block_pool import NULL_BLOCK
from headrace.errors import ConfigError
from headrace.sampling_params import OutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from headrace.config import EngineConfig
    from headrace.engine.engine import Engine
    from headrace.engine.sequence import Sequence
    from headrace.sampling_params import SamplingParams

Damaged = Literal["state", "conv", "kv"]
"""Recurrent states, convolution windows, or keys and values."""

_KIND_OF = {"state": "recurrent_state", "conv": "conv_window"}


@rt.op(role="damage", pools=rt.Write)
def zero_blocks(*, pools: tuple[Tensor, ...], blocks: tuple[int, ...]) -> None:
    """Fill blocks with zeros.

    Args:
        pools: Each [layers, blocks, ...].
        blocks: Which, in all layers.
    """
    for pool in pools:
        for block in blocks:
            pool.select(1, block).zero_()


def damageable(config: EngineConfig) -> EngineConfig:
    """Change settings so that a prompt's end falls between two steps and its blocks are its own."""
    return replace(config, async_scheduling=False, prefix_cache="none")


def damaged_answers(
    engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, what: Damaged
) -> list[str]:
    """Answer prompts together, the caches of each damaged before its second token.

    The first token comes from the same step as the prompt's end; no cache is read between them.

    Args:
        engine: Without requests, and with settings from `damageable`.
        prompts: Token ids.
        params: How to sample.
        what: Which caches to zero.

    Returns:
        The answers' texts, in order.

    Raises:
        ConfigError: `what` is unknown, or the engine runs ahead or shares blocks.
    """
    if what not in get_args(Damaged):
        raise ConfigError(f"damage is {what!r}; choose one of {', '.join(get_args(Damaged))}")
    if engine.parts.depth != 1 or engine.config.prefix_cache != "none":
        raise ConfigError(
            "damage at the start of an answer needs async_scheduling off and prefix_cache none"
        )
    whole = replace(params, output_kind=OutputKind.FINAL_ONLY)
    names = [f"damaged-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, whole)
    texts: dict[str, str] = {}
    hurt: set[tuple[int, int]] = set()
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
        for seq in engine.scheduler.running:
            # A preempted sequence computes its prompt again and is hurt again: another life.
            mark = (seq.seq_id, seq.life)
            if mark not in hurt and _is_answering(seq):
                hurt.add(mark)
                _damage(engine, seq, what)
    return [texts[name] for name in names]


def _is_answering(seq: Sequence) -> bool:
    return seq.num_output_tokens > 0 and seq.num_computed_tokens >= seq.num_prompt_tokens


def _damage(engine: Engine, seq: Sequence, what: Damaged) -> None:
    """Zero one kind of a sequence's blocks."""
    pools = engine.worker.pools
    if what == "kv":
        _zero(engine, (pools.k, pools.v), seq.kv_blocks)
        return
    for buffers, table in zip(pools.states, seq.state_tables, strict=True):
        chosen = tuple(b for b in buffers.values() if b.kind == _KIND_OF[what])
        _zero(engine, chosen, [block for block in table if block != NULL_BLOCK])


def _zero(engine: Engine, buffers: tuple[rt.Buffer, ...], blocks: list[int]) -> None:
    runtime = engine.parts.runtime
    runtime.launch(
        zero_blocks,
        runtime.stream("compute"),
        pools=tuple(buffer.rows(write=blocks) for buffer in buffers),
        blocks=tuple(blocks),
    )
