"""How a mixer's specification goes through generating rows, in either state scheme.

Which state is read and which ones are written is the same for all recurrent mixers, and is here; a
mixer brings the arithmetic of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import ColumnsRows, ReplayRows, Ring

    Step = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """From a packed token, its inputs with those before [W, F] and the state before it: the state
    after it, its answer, and what the ring keeps of it."""

    Again = Callable[[Tensor, Tensor], Tensor]
    """The state after a token of which the ring kept this."""


def answer_rows(
    inputs: Tensor,
    carried: int,
    step: Step,
    again: Again,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ColumnsRows | ReplayRows,
    ring: Ring | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the rows token by token, and update windows, states and ring.

    Args:
        inputs: Conv inputs, [T, F].
        carried: Inputs before a token that its convolution takes, W-1.
        step: A token's arithmetic.
        again: The same of a token in the ring.
        window: [S, W-1+s, F]; overwritten at the rows' blocks.
        state: [S, ...]; overwritten at the rows' blocks.
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N]; 0 for padded rows.
        rows: Where the rows' states are.
        ring: The ring's pools; None in the columns scheme.

    Yields:
        The packed tokens [t] of each row that takes part, and their answers, [t, ...].
    """
    for n in range(token_index.shape[0]):
        tokens = token_index[n, : int(query_lens[n])]
        if len(tokens) == 0:
            continue
        if ring is not None:
            answers = _replay_row(
                n, tokens, inputs, carried, step, again, window, state, rows, ring  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            answers = _columns_row(n, tokens, inputs, carried, step, window, state, rows)  # type: ignore[arg-type]
        if answers is not None:
            yield tokens, answers


def _columns_row(
    n: int,
    tokens: Tensor,
    inputs: Tensor,
    carried: int,
    step: Step,
    window: Tensor,
    state: Tensor,
    rows: ColumnsRows,
) -> Tensor | None:
    blocks, accepted = rows.window_blocks[n], int(rows.accepted[n])
    if accepted == 0 or int(blocks[0]) == 0 or int(blocks[accepted - 1]) == 0:
        return None
    own = window[int(blocks[0])]
    before = own[accepted - 1 : accepted - 1 + carried].float()
    history = torch.cat((before, inputs[tokens].float()))
    current = state[int(blocks[accepted - 1])].float()
    answers = []
    for t, token in enumerate(map(int, tokens)):
        current, answer, _ = step(token, history[t : t + carried + 1], current)
        answers.append(answer)
        # What a later step would load is what this one goes on with.
        current = current.to(state.dtype).float()
        if int(blocks[t]) > 0:
            state[int(blocks[t])] = current.to(state.dtype)
    moved = history[1:]
    own[: len(moved)] = moved.to(window.dtype)
    return torch.stack(answers)


def _replay_row(
    n: int,
    tokens: Tensor,
    inputs: Tensor,
    carried: int,
    step: Step,
    again: Again,
    window: Tensor,
    state: Tensor,
    rows: ReplayRows,
    ring: Ring,
) -> Tensor | None:
    base, block = int(rows.base_block[n]), int(rows.ring_block[n])
    if base == 0 or block == 0:
        return None
    base_len, computed = int(rows.base_len[n]), int(rows.computed[n])
    write_block, write_len = int(rows.write_block[n]), int(rows.write_len[n])
    length, x = ring.inputs.shape[1], inputs[tokens].float()
    # Inputs of positions base_len - carried .. computed - 1, then the new ones.
    at = torch.arange(base_len, computed) % length
    history = torch.cat((window[base, :carried].float(), ring.inputs[block, at].float(), x))

    def keep_grid(current: Tensor, position: int) -> Tensor:
        return current.to(state.dtype).float() if position % ring.interval == 0 else current

    current = state[base].float()
    for position in range(base_len, computed):
        current = again(current, ring.updates[block, position % length])
        current = keep_grid(current, position + 1)
        if position + 1 == write_len and write_block > 0:
            state[write_block] = current.to(state.dtype)
    answers = []
    for t, token in enumerate(map(int, tokens)):
        first = computed - base_len + t
        current, answer, kept = step(token, history[first : first + carried + 1], current)
        answers.append(answer)
        current = keep_grid(current, computed + t + 1)
        slot = (computed + t) % length
        ring.inputs[block, slot] = x[t].to(ring.inputs.dtype)
        ring.updates[block, slot] = kept
    if computed >= write_len and write_block > 0:
        before = history[write_len - base_len : write_len - base_len + carried]
        window[write_block, :carried] = before.to(window.dtype)
    return torch.stack(answers)
