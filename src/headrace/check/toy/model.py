"""The toy model: its ops on runtime buffers, and the same arithmetic one token at a time.

A sequence has keys in blocks (the attention part is their sum), a recurrent state, and a window of
its last two tokens. Everything is an integer modulo MODULUS, so a wrong value anywhere changes the
tokens soon.

Shapes: R rows of a step, Q tokens of a row, S drafts, M blocks of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace import rt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MODULUS = 10007
VOCABULARY = 7
END = 6
"""Token that ends a request."""
NUM_ROWS = 4
NUM_DRAFTS = 2
QUERY = 4
"""Tokens of a row: a chunk of a prompt, or one token and its drafts."""
BLOCK = 4
MAX_BLOCKS = 12
EMPTY, PREFILL, VERIFY = 0, 1, 2
"""Sorts of rows."""


def reference_tokens(prompt: Sequence[int], max_new: int) -> list[int]:
    """What a request must answer, computed alone, one token at a time."""
    state, first, second, attention = 0, 0, 0, 0
    answer: list[int] = []
    token = -1
    pending = list(prompt)
    position = 0
    while len(answer) < max_new:
        token = pending.pop(0) if pending else token
        attention = (attention + _key(token, position)) % MODULUS
        state = _advance(state, first, second, token)
        first, second = second, token
        position += 1
        if pending:
            continue
        token = _sample(state, attention, token)
        answer.append(token)
        if token == END:
            break
    return answer


def _key(token: int, position: int) -> int:
    return (token * 13 + position * position * 7 + 1) % MODULUS


def _advance(state: int, first: int, second: int, token: int) -> int:
    return (state * 31 + first * 101 + second * 57 + token * 17 + 3) % MODULUS


def _sample(state: int, attention: int, token: int) -> int:
    mixed = (state * 7 + attention) % MODULUS
    if mixed % 17 == 0:
        return END
    # Every second token is the guessed one, so that all accepted counts occur.
    return (token * 3 + 1) % END if mixed % 2 else mixed // 2 % END


def _begin(inputs: dict[str, Tensor], prev: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row starts: tokens accepted before, its first token, its position; all [R]."""
    is_chained = (inputs["prev_row"] >= 0) & (inputs["sort"] == VERIFY)
    row = inputs["prev_row"].clamp(min=0)
    # Clamped so that a fault shows as a wrong token and not as a crash.
    accepted = prev["accepted"].index_select(0, row).clamp(1, NUM_DRAFTS + 1)
    accepted = torch.where(is_chained, accepted, 1)
    sampled = prev["sampled"].index_select(0, row)
    last = sampled.gather(1, (accepted - 1).unsqueeze(1)).squeeze(1)
    token = torch.where(is_chained, last, inputs["tokens"][:, 0])
    length = prev["length"].index_select(0, row).clamp(0, MAX_BLOCKS * BLOCK - QUERY)
    position = torch.where(is_chained, length, inputs["start"])
    return accepted, token, position


@rt.op(role="draft", inputs=rt.Read, prev=rt.Read, scratch=rt.Write)
def draft_begin(*, inputs: dict[str, Tensor], prev: dict[str, Tensor], scratch: Tensor) -> None:
    """Put each row's first token into the scratch, [R]."""
    scratch.copy_(_begin(inputs, prev)[1])


@rt.op(role="draft", scratch=rt.Read, drafts=rt.Write)
def draft_extend(*, scratch: Tensor, drafts: Tensor) -> None:
    """Guess the next tokens from the first one, [R] to [R, S]."""
    token = scratch
    for index in range(NUM_DRAFTS):
        token = (token * 3 + 1) % END
        drafts[:, index] = token


@rt.op(role="forward", inputs=rt.Read, prev=rt.Read, kv=rt.Read, scratch=rt.Write)
def attend(
    *, inputs: dict[str, Tensor], prev: dict[str, Tensor], kv: Tensor, scratch: Tensor
) -> None:
    """Sum the keys before each row's first token into the scratch, [R]."""
    _, _, position = _begin(inputs, prev)
    table = inputs["table"].clamp(0, kv.shape[0] - 1)
    keys = kv.index_select(0, table.reshape(-1)).reshape(table.shape[0], -1)
    is_before = torch.arange(keys.shape[1]) < position.unsqueeze(1)
    scratch.copy_(torch.where(is_before, keys, 0).sum(1) % MODULUS)


@rt.op(
    role="forward",
    inputs=rt.Read,
    prev=rt.Read,
    drafts=rt.Read,
    scratch=rt.Read,
    kv=rt.ReadWrite,
    state=rt.ReadWrite,
    window=rt.ReadWrite,
    out=rt.Write,
)
def forward(
    *,
    inputs: dict[str, Tensor],
    prev: dict[str, Tensor],
    drafts: Tensor,
    scratch: Tensor,
    kv: Tensor,
    state: Tensor,
    window: Tensor,
    out: dict[str, Tensor],
) -> None:
    """Compute all rows; state columns, window, keys and results are written.

    Args:
        inputs: The step's inputs.
        prev: Results of the step before: accepted [R], sampled [R, 1+S], length [R].
        drafts: Guessed tokens, [R, S].
        scratch: Attention over earlier tokens, [R].
        kv: Keys, [blocks, BLOCK].
        state: After each of a row's last tokens, [slots, 1+S].
        window: Last tokens, [slots, 2+S]; column a-1 starts the window after a accepted tokens.
        out: Results of this step, as `prev`.
    """
    accepted, token, position = _begin(inputs, prev)
    sort, slot = inputs["sort"], inputs["slot"].clamp(0, state.shape[0] - 1)
    is_live = sort != EMPTY
    is_verify = sort == VERIFY
    count = torch.where(is_verify, NUM_DRAFTS + 1, inputs["count"])
    column = (accepted - 1).unsqueeze(1)
    value = state.index_select(0, slot).gather(1, column).squeeze(1)
    rows = window.index_select(0, slot)
    first = rows.gather(1, column).squeeze(1)
    second = rows.gather(1, column + 1).squeeze(1)
    attention = scratch.clone()
    states, samples, keys = [], [], []
    tokens = [first, second]
    fed = torch.where(
        is_verify.unsqueeze(1),
        torch.cat([token.unsqueeze(1), drafts, token.unsqueeze(1)], dim=1),
        inputs["tokens"],
    )
    for index in range(QUERY):
        token = fed[:, index]
        key = (token * 13 + (position + index) ** 2 * 7 + 1) % MODULUS
        attention = (attention + key) % MODULUS
        advanced = (value * 31 + tokens[-2] * 101 + tokens[-1] * 57 + token * 17 + 3) % MODULUS
        value = torch.where(index < count, advanced, value)
        states.append(value)
        keys.append(key)
        tokens.append(token)
        mixed = (value * 7 + attention) % MODULUS
        sample = torch.where(mixed % 2 == 1, (token * 3 + 1) % END, mixed // 2 % END)
        samples.append(torch.where(mixed % 17 == 0, END, sample))
    sampled = torch.stack(samples, dim=1)
    matches = (fed[:, 1 : NUM_DRAFTS + 1] == sampled[:, :NUM_DRAFTS]).long()
    kept = 1 + matches.cumprod(1).sum(1)
    last = (count - 1).clamp(min=0).unsqueeze(1)
    stacked = torch.stack(tokens, dim=1)
    # A chunk leaves its state in column 0; a verify row leaves one state for each length.
    columns = torch.stack(states[: NUM_DRAFTS + 1], dim=1)
    after = torch.stack(states, dim=1).gather(1, last).expand(-1, NUM_DRAFTS + 1)
    new_state = torch.where(is_verify.unsqueeze(1), columns, after)
    tail = torch.stack(
        [stacked.gather(1, last + 1 + index).squeeze(1) for index in range(2)] + [second] * 2, dim=1
    )
    new_window = torch.where(is_verify.unsqueeze(1), stacked[:, 1 : NUM_DRAFTS + 3], tail)
    state[slot[is_live]] = new_state[is_live]
    window[slot[is_live]] = new_window[is_live]
    places = position.unsqueeze(1) + torch.arange(QUERY)
    blocks = inputs["table"].gather(1, (places // BLOCK).clamp(max=MAX_BLOCKS - 1))
    is_written = (torch.arange(QUERY) < count.unsqueeze(1)) & is_live.unsqueeze(1)
    flat = (blocks.clamp(0, kv.shape[0] - 1) * BLOCK + places % BLOCK)[is_written]
    kv.view(-1)[flat] = torch.stack(keys, dim=1)[is_written]
    out["accepted"].copy_(torch.where(is_verify, kept, 1))
    final = sampled.gather(1, last).expand(-1, NUM_DRAFTS + 1)
    out["sampled"].copy_(torch.where(is_verify.unsqueeze(1), sampled[:, : NUM_DRAFTS + 1], final))
    out["length"].copy_(position + torch.where(is_verify, kept, count))


@rt.op(role="zero", state=rt.ReadWrite, window=rt.ReadWrite)
def zero(*, state: Tensor, window: Tensor, slot: int) -> None:
    """Clear a slot for a new sequence."""
    state[slot] = 0
    window[slot] = 0


@rt.op(role="checkpoint", state=rt.Read, window=rt.Read, kept=rt.ReadWrite)
def keep(
    *, state: Tensor, window: Tensor, kept: Tensor, slot: int, index: int, accepted: int
) -> None:
    """Copy the state after `accepted` tokens of the last row to a checkpoint, [checkpoints, 3]."""
    kept[index, 0] = state[slot, accepted - 1]
    kept[index, 1:] = window[slot, accepted - 1 : accepted + 1]


@rt.op(role="restore", kept=rt.Read, state=rt.ReadWrite, window=rt.ReadWrite)
def restore(*, kept: Tensor, state: Tensor, window: Tensor, slot: int, index: int) -> None:
    """Copy a checkpoint to column 0 of a slot."""
    state[slot, 0] = kept[index, 0]
    window[slot, :2] = kept[index, 1:]


@rt.op(role="graph input", source=rt.Read, target=rt.Write)
def copy_all(*, source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copy arrays of the same names: frame to static inputs, static outputs to frame."""
    for name, tensor in target.items():
        tensor.copy_(source[name])
