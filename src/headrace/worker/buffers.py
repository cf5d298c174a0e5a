"""All memory that a worker owns, and who may write which part of it when.

N = max_num_seqs, s = most drafts, T = padded token budget, V = vocabulary, S = state blocks,
RB = ring blocks, one per slot and the null block.

buffer           | shape, dtype          | written by                    | read by         | until
-----------------|-----------------------|-------------------------------|-----------------|--------
kv.k, kv.v       | [layers, B, P, G, D]  | forward, draft: owner's       | forward, draft  | freed
kv.tokens        | [B, P] i64            | advance, copy: owner's        | verify, draft   | freed
state.<g>.<name> | [layers, S, ...]      | copy, advance, forward, save  | forward         | freed
ring.<g>.<name>  | [layers, RB, R, ...]  | forward: own slot             | forward         | overwr.
carry.computed   | [N+1] i64             | verify                        | advance         | left
carry.accepted   | [N+1] i64             | advance, verify, save         | advance         | left
carry.state_col… | [N+1] i64             | advance, verify               | advance, save   | left
carry.base_len   | [N+1] i64             | advance, verify               | advance         | left
carry.last_token | [N+1] i64             | verify                        | advance         | step
carry.drafts     | [N+1, s] i64          | draft                         | advance, verify | step
draft.*          | as kv, state and ring | as those, by the draft model  | as those        | those
work.*           | one step's values     | advance, forward, verify      | later launches  | step
exchange         | [1] i64               | collectives: forward, drafts  | those           | step
prompt.*         | [T, ...], [., V]      | score_prompt                  | fetch           | step
rules<i>.*       | per frame             | Stage.commit, before verify   | verify          | again
masks<i>.*       | per frame             | Stage.commit, before verify   | verify          | again
frame.inputs.*   | per frame             | Stage.commit, before the step | launches        | again
frame.outputs.*  | per frame             | verify, save, land; once each | fetch           | again

Graphs have memory of their own for inputs and outputs, see graphs.py. Row N of the carry arrays is
nobody's: rows of padding have it. They compute no token, so their counts stay 0.

In the `compact` layout the counts (computed, accepted, state_column, base_len) live on the host by
batch row, and are staged with each step; last_token and drafts are gathered by the row map.
Everything runs on one stream, `compute`; fetches run on `d2h` after the step's event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace import rt
from headrace.models.batch import ROW_TILE
from headrace.ops.gated_delta_prefill import max_numbers
from headrace.ops.paged_prefill import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.models.batch import StateGroupSpec
    from headrace.ops.paged_prefill import Tiling

MAX_LOGPROBS = 20
MAX_PROMPT_LOGITS = 2**22
"""Most log-probabilities that a request may have of its prompt when it asks for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Every size that memory is allocated by; fixed at start.

    Attributes:
        max_num_seqs: N.
        max_tokens: Tokens in a step, padding excluded.
        max_drafts: s.
        max_model_len: Most tokens of a sequence.
        block_size: P.
        num_kv_blocks: B, null block included.
        num_state_blocks: S, null block included.
        vocab_size: V.
        hidden_size: C.
    """

    max_num_seqs: int
    max_tokens: int
    max_drafts: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    num_state_blocks: int
    vocab_size: int
    hidden_size: int

    @property
    def table_width(self) -> int:
        """KV blocks of one sequence, drafters' overhang included."""
        return -(-(self.max_model_len + self.max_drafts) // self.block_size) + 1

    @property
    def max_samples(self) -> int:
        """Sample positions of a step, padded."""
        return _pad(self.max_num_seqs * (1 + self.max_drafts))

    @property
    def padded_tokens(self) -> int:
        """T: a step's tokens, or all rows with all drafts: captured steps are filled up."""
        return max(_pad(self.max_tokens), self.max_samples)


def state_columns(sizes: WorkerSizes) -> int:
    """Most columns that a verify row may name of a state table."""
    return sizes.max_drafts + 4


def _pad(count: int) -> int:
    return -(-count // ROW_TILE) * ROW_TILE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pools:
    """Device memory that outlives steps and is handed out by block."""

    k: rt.Buffer
    v: rt.Buffer
    states: tuple[dict[str, rt.Buffer], ...]
    rings: tuple[dict[str, rt.Buffer], ...]


def make_pools(
    runtime: rt.Runtime,
    sizes: WorkerSizes,
    *,
    kv_shape: tuple[int, int, int, int],
    kv_dtype: torch.dtype,
    groups: tuple[StateGroupSpec, ...],
    ring_size: int,
    prefix: str = "",
    num_scratch: int = 0,
) -> Pools:
    """Allocate the pools.

    Args:
        runtime: Where memory comes from.
        sizes: How many blocks.
        kv_shape: Attention layers, KV heads, size of a key, size of a value.
        kv_dtype: Dtype of keys and values.
        groups: The model's state groups.
        ring_size: R, 0 if the scheme has no ring.
        prefix: Of the buffers' names.
        num_scratch: State blocks beyond those that are handed out.
    """
    layers, heads, *widths = kv_shape
    k, v = (
        runtime.alloc(
            f"{prefix}kv.{name}",
            (layers, sizes.num_kv_blocks, sizes.block_size, heads, width),
            kv_dtype,
            kind="kv_block",
            row_dim=1,
            fill=0,
        )
        for name, width in zip("kv", widths, strict=True)
    )
    states, rings = [], []
    for index, group in enumerate(groups):
        count = len(group.layers)
        states.append(
            rt.Bundle({
                spec.name: runtime.alloc(
                    f"{prefix}state.{index}.{spec.name}",
                    (count, sizes.num_state_blocks + num_scratch, *spec.shape),
                    getattr(torch, spec.dtype),
                    kind="conv_window" if spec.kind == "window" else "recurrent_state",
                    row_dim=1,
                    fill=0,
                )
                for spec in group.state
            })
        )
        rings.append(
            rt.Bundle({
                spec.name: runtime.alloc(
                    f"{prefix}ring.{index}.{spec.name}",
                    (count, sizes.max_num_seqs + 1, ring_size, *spec.shape),
                    getattr(torch, spec.dtype),
                    kind="ring",
                    row_dim=1,
                    fill=0,
                )
                for spec in (group.ring if ring_size else ())
            })
        )
    return Pools(k=k, v=v, states=tuple(states), rings=tuple(rings))


def input_fields(sizes: WorkerSizes, num_groups: int) -> dict[str, rt.Field]:
    """Fields that the host stages for each step; lengths and offsets are launch arguments."""
    n, t, s = sizes.max_num_seqs, sizes.padded_tokens, sizes.max_drafts
    i64, f32 = torch.int64, torch.float32
    fields = {
        "token_ids": ((t,), i64),  # known tokens, after the verify rows' places
        "positions": ((t,), i64),
        "kv_slots": ((t,), i64),
        "next_tokens": ((t,), i64),  # the token after each known one, -1 where it is sampled
        "tables": ((n * sizes.table_width,), torch.int32),
        "state_tables": ((max(1, num_groups) * n * state_columns(sizes),), torch.int32),
        "rows": ((n,), i64),  # carry row of each verify row
        "slots": ((n,), i64),
        "lengths": ((n,), i64),
        "state_base": ((n,), i64),
        "token_row": ((n * (1 + s),), i64),
        "token_column": ((n * (1 + s),), i64),
        "token_index": ((n * (1 + s),), i64),
        "known_rows": ((n,), i64),  # carry row of each known row that ends its known tokens
        "known_slots": ((n,), i64),
        "known_ends": ((n,), i64),
        "known_next": ((n,), i64),  # its next input, -1 where that is sampled now
        "known_sample": ((n,), i64),  # where in the samples, 0 where known_next is given
        "known_blocks": ((max(1, num_groups) * n,), torch.int32),  # where its state is
        "known_last": ((n,), i64),  # packed index of its last token
        "sample_index": ((sizes.max_samples,), i64),
        "sample_row": ((sizes.max_samples,), i64),
        "row_float": ((n * 3,), f32),  # temperature, top_p, min_p of each sampling row
        "row_int": ((n * 2,), i64),  # top_k, seed
        "draft_rows": ((n,), i64),
        "draft_last": ((n,), i64),  # packed index a row's draft starts from (known rows), else -1
        "draft_tables": ((n * sizes.table_width,), torch.int32),
        "row_map": ((n,), i64),  # compact: previous row of each batch row, -1 if new
        # compact: computed, accepted, state_column, base_len by row
        "counts": (((n + 1) * 4,), i64),
    }
    return {name: rt.Field(shape, dtype) for name, (shape, dtype) in fields.items()}


def tile_fields(sizes: WorkerSizes, tilings: Mapping[str, Tiling | None]) -> dict[str, rt.Field]:
    """Fields that list the tiles of known rows, for models whose prompts attend in a kernel."""
    return {
        name: rt.Field(
            (tiling.max_records(sizes.max_tokens, sizes.max_num_seqs), FIELDS), torch.int32
        )
        for name, tiling in tilings.items()
        if tiling is not None
    }


def prompt_fields(sizes: WorkerSizes, num_groups: int, grid: int) -> dict[str, rt.Field]:
    """Field that lists the prompts for each state table, for models whose states have a kernel."""
    numbers = max_numbers(sizes.max_tokens, sizes.max_num_seqs, grid)
    return {"prompts": rt.Field((num_groups * numbers,), torch.int32)}


def output_fields(sizes: WorkerSizes) -> dict[str, rt.Field]:
    """What a step produces for the host, rows in the step's own order."""
    n, s, i64 = sizes.max_num_seqs, sizes.max_drafts, torch.int64
    r = sizes.max_samples
    return {
        "tokens": rt.Field((n, 1 + s), i64, kind="sampled_tokens"),
        "num_sampled": rt.Field((n,), i64, kind="accepted_counts"),
        "accepted": rt.Field((n,), i64, kind="accepted_counts"),
        "drafts": rt.Field((n, max(1, s)), i64, kind="sampled_tokens"),
        "logprob": rt.Field((r,), torch.float32),
        "rank": rt.Field((r,), i64),
        "top_values": rt.Field((r, MAX_LOGPROBS), torch.float32),
        "top_ids": rt.Field((r, MAX_LOGPROBS), i64),
    }
