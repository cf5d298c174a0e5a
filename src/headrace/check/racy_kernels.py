"""Small kernels with one fault each, behind a flag, and the same detour without it.

`FAULT` picks the faulty form. Every kernel stands for a way in which state kernels went wrong
(docs/races.md); none is used by the engine.
"""

# Kernels have no types, and their branches on constants are how a fault is switched on.
# ruff: noqa: ANN001, ANN201, PLR2004, SIM102, SIM108
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def save_and_reset_kernel(
    accepted_ptr, snapshot_ptr, state_ptr, out_ptr, LAYERS: tl.constexpr, FAULT: tl.constexpr
):
    """One program for each row and layer; the program of layer 0 resets the row's count."""
    row, layer = tl.program_id(0), tl.program_id(1)
    if FAULT:
        accepted = tl.load(accepted_ptr + row)
    else:
        accepted = tl.load(snapshot_ptr + row)
    if accepted > 1:
        place = row * LAYERS + layer
        tl.store(out_ptr + place, tl.load(state_ptr + place) + accepted)
        if layer == 0:
            tl.store(accepted_ptr + row, 1)


@triton.jit
def step_state_kernel(slots_ptr, lengths_ptr, x_ptr, state_ptr, SIZE: tl.constexpr):
    """Add each row's input to its state block; the fault is in the slots that it is given."""
    row = tl.program_id(0)
    if tl.load(lengths_ptr + row) > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        i = tl.arange(0, SIZE)
        state = tl.load(state_ptr + slot * SIZE + i)
        tl.store(state_ptr + slot * SIZE + i, 2 * state + tl.load(x_ptr + row * SIZE + i))


@triton.jit
def permute_rows_kernel(order_ptr, rows_ptr, out_ptr, SIZE: tl.constexpr, FAULT: tl.constexpr):
    """Bring rows into another order, in place or into other memory."""
    row = tl.program_id(0)
    source = tl.load(order_ptr + row).to(tl.int64)
    i = tl.arange(0, SIZE)
    values = tl.load(rows_ptr + source * SIZE + i)
    if FAULT:
        tl.store(rows_ptr + row * SIZE + i, values)
    else:
        tl.store(out_ptr + row * SIZE + i, values)


@triton.jit
def copy_blocks_kernel(
    source_ptr, target_ptr, pool_ptr, snapshot_ptr, SIZE: tl.constexpr, FAULT: tl.constexpr
):
    """Copy blocks to other blocks of the pool; one block's target may be another one's source."""
    move = tl.program_id(0)
    source = tl.load(source_ptr + move).to(tl.int64)
    target = tl.load(target_ptr + move).to(tl.int64)
    i = tl.arange(0, SIZE)
    if FAULT:
        block = tl.load(pool_ptr + source * SIZE + i)
    else:
        block = tl.load(snapshot_ptr + source * SIZE + i)
    tl.store(pool_ptr + target * SIZE + i, block)


@triton.jit
def shift_window_kernel(window_ptr, BIAS: tl.constexpr, SIZE: tl.constexpr, FAULT: tl.constexpr):
    """Shift a window to the left in place: all loads must come before any store."""
    i = tl.arange(0, SIZE)
    values = tl.load(window_ptr + i + BIAS, mask=i + BIAS < SIZE, other=0)
    if not FAULT:
        tl.debug_barrier()
    tl.store(window_ptr + i, values, mask=i + BIAS < SIZE)


@triton.jit
def shift_window_lane_kernel(window_ptr, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """The same shift without barriers, one lane a program: an order of them is a legal timing."""
    i = tl.program_id(0)
    if i + BIAS < SIZE:
        tl.store(window_ptr + i, tl.load(window_ptr + i + BIAS))


@triton.jit
def scatter_kernel(slots_ptr, x_ptr, out_ptr, SIZE: tl.constexpr):
    """Scatter one program's values; the fault is a slot that is named twice."""
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + tl.load(slots_ptr + i), tl.load(x_ptr + i))


@triton.jit
def scatter_lane_kernel(slots_ptr, x_ptr, out_ptr):
    """The same scatter, one lane a program."""
    i = tl.program_id(0)
    tl.store(out_ptr + tl.load(slots_ptr + i), tl.load(x_ptr + i))


@triton.jit
def flag_kernel(x_ptr, flag_ptr, sum_ptr, out_ptr, SIZE: tl.constexpr, PART: tl.constexpr):
    """Program 0 makes a sum and raises a flag; the others look at the flag. PART 1, 2: apart."""
    program = tl.program_id(0)
    if PART != 2:
        if program == 0:
            tl.store(sum_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, SIZE))))
            tl.store(flag_ptr, 1)
    if PART != 1:
        if program > 0:
            ready = tl.load(flag_ptr)
            if ready == 1:
                tl.store(out_ptr + program, tl.load(sum_ptr))


@triton.jit
def reduce_kernel(x_ptr, partial_ptr, SIZE: tl.constexpr, FAULT: tl.constexpr):
    """Sum a tile: into one number by float atomics, or into the program's own partial sum."""
    tile = tl.program_id(0)
    part = tl.sum(tl.load(x_ptr + tile * SIZE + tl.arange(0, SIZE)))
    if FAULT:
        tl.atomic_add(partial_ptr, part)
    else:
        tl.store(partial_ptr + tile, part)


@triton.jit
def add_partials_kernel(partial_ptr, TILES: tl.constexpr):
    """Add the partial sums in one fixed order."""
    total = tl.load(partial_ptr)
    for tile in range(1, TILES):
        total += tl.load(partial_ptr + tile)
    tl.debug_barrier()
    tl.store(partial_ptr, total)


@triton.jit
def remap_kernel(map_ptr, new_map_ptr, x_ptr, out_ptr, ROWS: tl.constexpr, FAULT: tl.constexpr):
    """Gather by the row map and write the map of the next step."""
    row = tl.program_id(0)
    source = tl.load(map_ptr + row)
    tl.store(out_ptr + row, tl.load(x_ptr + source))
    following = (row + 1) % ROWS
    if FAULT:
        tl.store(map_ptr + following, row)
    else:
        tl.store(new_map_ptr + following, row)


@triton.jit
def count_once_kernel(count_ptr, x_ptr, out_ptr, TILE: tl.constexpr, FAULT: tl.constexpr):
    """Count each row once: the guard was written before a row was split into tiles."""
    row, layer, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (row * tl.num_programs(1) + layer) * tl.num_programs(2) + tile
    i = place * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * 2)
    if layer == 0 and (FAULT or tile == 0):
        count = tl.load(count_ptr + row)
        tl.debug_barrier()
        tl.store(count_ptr + row, count + 1)


@triton.jit
def take_slot_kernel(next_ptr, slots_ptr, x_ptr, out_ptr, FAULT: tl.constexpr):
    """Give each row a slot: the next free one by a shared counter, or the one planned for it."""
    row = tl.program_id(0)
    if FAULT:
        slot = tl.atomic_add(next_ptr, 1)
    else:
        slot = tl.load(slots_ptr + row)
    tl.store(out_ptr + slot, tl.load(x_ptr + row))


@triton.jit
def last_tile_kernel(x_ptr, SIZE, TILE: tl.constexpr, FAULT: tl.constexpr):
    """Double every element; the faulty last tile moves back to stay full, over its neighbour's."""
    start = tl.program_id(0) * TILE
    if FAULT:
        start = tl.minimum(start, SIZE - TILE)
    i = start + tl.arange(0, TILE)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < SIZE, other=0) * 2, mask=i < SIZE)


@triton.jit
def ring_kernel(ring_ptr, key_ptr, out_ptr, RING: tl.constexpr, HEADS: tl.constexpr):
    """Each head sums the ring's pending keys; head 0 writes the new key: RING must have room."""
    row, head = tl.program_id(0), tl.program_id(1)
    total = 0
    for position in range(4):
        total += tl.load(ring_ptr + row * RING + position % RING)
    tl.store(out_ptr + row * HEADS + head, total * (head + 1))
    if head == 0:
        tl.store(ring_ptr + row * RING + 4 % RING, tl.load(key_ptr + row))
