"""Both copies of the columns scheme, each in one launch over rows, layers, tensors and tiles.

The kernel is one function on purpose: the interpreter spends milliseconds on every call of another.
"""

# Launch arguments are passed by name or in the order of the signature, once, in `fused`.
# ruff: noqa: ANN201, C901, PLR0912

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns_kernel(
    pools,
    layer_strides,
    block_strides,
    table_ptr,
    scheduled_ptr,
    computed_ptr,
    drafts_ptr,
    accepted_ptr,
    state_column_ptr,
    rows_ptr,
    accepted_out_ptr,
    state_column_out_ptr,
    table_stride,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_ACCEPTED: tl.constexpr,
    IS_SAVE: tl.constexpr,
    IS_DERIVED: tl.constexpr,
    IS_MAPPED: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRIES_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    ENTRIES_FIRST: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program for each row, layer and tensor, and tile.

    Every program of a row comes to the same decision, since it reads what no program writes. The
    program of layer 0, tensor 0 and tile 0 alone writes the row's counts.

    Tensor p has ENTRIES[p] x CHANNELS[p] elements a block (a recurrent state: one entry). Without
    IS_SAVE: the move before the forward pass; with it: the save after the verification, where
    computed is the valid length after the step unless IS_DERIVED.
    """
    row = tl.program_id(0)
    tile = tl.program_id(2)
    scheduled = tl.load(scheduled_ptr + row).to(tl.int64)
    place = row.to(tl.int64)
    if IS_MAPPED:
        place = tl.load(rows_ptr + row).to(tl.int64)
    if scheduled > 0:
        accepted = tl.load(accepted_ptr + place).to(tl.int64)
        tl.device_assert(accepted <= MAX_ACCEPTED, "accepted is more than a step can keep")
        if (accepted > 0) & (accepted <= MAX_ACCEPTED):
            computed = tl.load(computed_ptr + place).to(tl.int64)
            source = tl.load(state_column_ptr + place).to(tl.int64)
            if IS_SAVE:
                if IS_DERIVED:
                    drafts = tl.load(drafts_ptr + row).to(tl.int64)
                    computed = computed + scheduled - drafts + accepted - 1
                target = computed // BLOCK_SIZE - 1
                offset = (target + 1) * BLOCK_SIZE - (computed - (accepted - 1))
            else:
                target = (computed + scheduled + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
                offset = accepted - 1

            # Blocks of the window's and the state's source and of the target; 0 for none.
            entry = table_ptr + place * table_stride
            from_state = source + offset
            window_block = tl.load(
                entry + source, mask=(source >= 0) & (source < COLUMNS), other=0
            ).to(tl.int64)
            state_block = tl.load(
                entry + from_state,
                mask=(source >= 0) & (offset >= 0) & (from_state < COLUMNS),
                other=0,
            ).to(tl.int64)
            target_block = tl.load(
                entry + target, mask=(target >= 0) & (target < COLUMNS), other=0
            ).to(tl.int64)

            is_writer = (tl.program_id(1) == 0) & (tile == 0)
            if IS_SAVE:
                found = (offset >= 0) & (window_block != 0)
                copies = found & ((offset != 0) | (source != target))
                if is_writer & found & (source == target):
                    tl.store(accepted_out_ptr + place, 1)
            else:
                found = target_block != 0
                copies = found & (source >= 0) & (source != target)
                if is_writer & found:
                    tl.store(accepted_out_ptr + place, tl.where(copies, 1, accepted))
                    tl.store(state_column_out_ptr + place, target)

            copies = copies & (window_block != 0) & (state_block != 0) & (target_block != 0)
            if copies:
                layer = (tl.program_id(1) // len(pools)).to(tl.int64)
                which = tl.program_id(1) % len(pools)
                for p in tl.static_range(len(pools)):
                    if which == p:
                        base = pools[p] + layer * layer_strides[p]
                        new = base + target_block * block_strides[p]
                        if IS_WINDOW[p]:
                            old = base + window_block * block_strides[p]
                            e = tl.arange(0, ENTRIES_PADDED[p])[:, None]
                            for first in range(0, CHANNELS[p], CHANNEL_TILE * TILES):
                                channel = tl.cast(first, tl.int64) + tile * CHANNEL_TILE
                                channel = (channel + tl.arange(0, CHANNEL_TILE))[None, :]
                                keep = (e + offset < ENTRIES[p]) & (channel < CHANNELS[p])
                                if ENTRIES_FIRST[p]:
                                    at = e * CHANNELS[p] + channel
                                    step = offset * CHANNELS[p]
                                else:
                                    at = channel * ENTRIES[p] + e
                                    step = offset
                                values = tl.load(old + at + step, mask=keep)
                                # A shift inside one block stores over what other lanes load: all
                                # loads come first. Other tiles have other channels.
                                tl.debug_barrier()
                                tl.store(new + at, values, mask=keep)
                        else:
                            old = base + state_block * block_strides[p]
                            for first in range(0, CHANNELS[p], BLOCK * TILES):
                                at = tl.cast(first, tl.int64) + tile * BLOCK + tl.arange(0, BLOCK)
                                keep = at < CHANNELS[p]
                                tl.store(new + at, tl.load(old + at, mask=keep), mask=keep)
