"""The columns scheme on a model in which a state is its token count (align.md, sections 3 to 6)."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.state_columns import StatePool, plan, reference

if TYPE_CHECKING:
    from torch import Tensor

TAPS = 3
"""W of the modelled convolution."""


class ModelMismatchError(AssertionError):
    """The scheme read or kept a state of the wrong number of tokens."""


def _require(truth: Tensor, what: str) -> None:
    if not bool(truth.all()):
        raise ModelMismatchError(what)


class Model:
    """N sequences in lockstep; each state is its token count, each window its token positions."""

    def __init__(self, scheme: dict[str, Any], *, rows: int, block_size: int, drafts: int) -> None:
        self.scheme, self.block_size, self.max_drafts = scheme, block_size, drafts
        self.columns = 8 + drafts
        blocks = 1 + rows * self.columns
        self.table = torch.arange(1, blocks, dtype=torch.int32).view(rows, self.columns)
        self.state = torch.full((1, blocks, 1), -1)
        self.window = torch.full((1, blocks, TAPS - 1 + drafts, 1), -1)
        self.pools = (
            StatePool(tensor=self.state, kind="recurrent"),
            StatePool(tensor=self.window, kind="window"),
        )
        self.computed = torch.zeros(rows, dtype=torch.int64)
        self.accepted = torch.ones(rows, dtype=torch.int64)
        self.state_column = torch.full((rows,), -1)

    def step(self, scheduled: Tensor, drafts: Tensor, kept: Tensor, *, derived: bool) -> None:
        """Run one step in which the verify keeps `kept` tokens; 0 scheduled: the row rests."""
        runs = scheduled > 0
        neutral = torch.ones_like(kept)
        self.scheme["premove"](
            self.pools,
            self.table,
            computed=self.computed,
            scheduled=scheduled,
            accepted=self.accepted.clone(),
            state_column=self.state_column.clone(),
            accepted_out=self.accepted,
            state_column_out=self.state_column,
            block_size=self.block_size,
            max_accepted=self.max_drafts + 1,
        )
        ends = self.computed + scheduled
        current = (ends - 1) // self.block_size
        _require((self.state_column == current) | ~runs, "state_column is not the column written")
        self._forward(scheduled, drafts, runs)
        before = self.computed
        self.computed = torch.where(runs, ends - drafts + kept - 1, before)
        self.accepted = torch.where(runs, kept, self.accepted)
        count = (
            {"computed": before, "drafts": drafts} if derived else {"new_computed": self.computed}
        )
        self.scheme["save"](
            self.pools,
            self.table,
            scheduled=scheduled,
            accepted=self.accepted.clone(),
            state_column=self.state_column,
            accepted_out=self.accepted,
            block_size=self.block_size,
            max_accepted=self.max_drafts + 1,
            **count,
        )
        _require((self.accepted >= neutral) & (self.accepted <= self.max_drafts + 1), "accepted")
        self._check_columns()

    def _forward(self, scheduled: Tensor, drafts: Tensor, runs: Tensor) -> None:
        """What the step kernels read and write (align.md, section 5)."""
        rows = torch.arange(len(runs))
        fresh = self.computed == 0
        column = self.state_column.clamp(min=0)
        offset = self.accepted - 1
        source = self.table[rows, (column + offset).clamp(max=self.columns - 1)].long()
        _require(
            (self.state[0, source, 0] == self.computed) | fresh | ~runs, "initial state is wrong"
        )
        running = self.table[rows, column].long()
        window = self.window[0, running, :, 0]
        tap = torch.arange(TAPS - 1)
        entry = (offset[:, None] + tap).clamp(max=window.shape[1] - 1)
        old = torch.where(fresh[:, None], -1, window.gather(1, entry))
        expected = self.computed[:, None] - (TAPS - 1) + tap
        _require(
            (old == expected.clamp(min=-1)) | fresh[:, None] | ~runs[:, None], "window is wrong"
        )
        # A verify row leaves one state per token; other rows leave the last one, window at 0.
        verify = (scheduled == drafts + 1) & ~fresh
        for t in range(self.max_drafts + 1):
            block = self.table[rows, (column + t).clamp(max=self.columns - 1)].long()
            write = runs & verify & (t < scheduled)
            self.state[0, block[write], 0] = (self.computed + t + 1)[write]
        last = runs & ~verify
        self.state[0, running[last], 0] = (self.computed + scheduled)[last]
        first = torch.where(verify, self.computed + 1, self.computed + scheduled) - (TAPS - 1)
        entries = first[:, None] + torch.arange(window.shape[1])
        end = self.computed + scheduled
        entries = torch.where(entries < end[:, None], entries.clamp(min=-1), -9)
        self.window[0, running[runs], :, 0] = entries[runs]

    def _check_columns(self) -> None:
        """Every column whose boundary is inside the valid tokens holds exactly that state."""
        for column in range(self.columns - self.max_drafts):
            boundary = (column + 1) * self.block_size
            block = self.table[:, column].long()
            due = self.computed >= boundary
            _require((self.state[0, block, 0] == boundary) | ~due, f"column {column} is wrong")
            entries = self.window[0, block, : TAPS - 1, 0]
            expected = (boundary - (TAPS - 1) + torch.arange(TAPS - 1)).clamp(min=-1)
            # The running column's window is read at its own offset and checked by the next step.
            due &= self.state_column != column
            _require((entries == expected) | ~due[:, None], f"window of column {column} is wrong")
        _require(self.state[0, 0] == -1, "null block was written")


def run_model(scheme: dict[str, Any], block_size: int, drafts: int) -> None:
    """Prefill every start, then three verify steps with all drafts and accepted counts."""
    outcomes = [(d, a) for d in range(drafts + 1) for a in range(1, d + 2)]
    starts = range(1, 2 * block_size + 1)
    steps = 3 if len(outcomes) <= 6 else 2
    cases: list[Any] = list(itertools.product(starts, *[outcomes] * steps))
    start = torch.tensor([case[0] for case in cases])
    model = Model(scheme, rows=len(cases), block_size=block_size, drafts=drafts)
    none, one = torch.zeros_like(start), torch.ones_like(start)
    # Prompt chunks end on boundaries; the last one ends the prompt.
    for _ in range(3):
        left = start - model.computed
        model.step(left.clamp(max=block_size), none, one, derived=False)
    _require(model.computed == start, "prefill did not finish")
    for index in range(1, steps + 1):
        draft = torch.tensor([case[index][0] for case in cases])
        kept = torch.tensor([case[index][1] for case in cases])
        model.step(draft + 1, draft, kept, derived=index % 2 == 0)
    model.step(one, none, one, derived=False)


SHIPPED = {"premove": reference.premove, "save": reference.save}
SIZES = [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (6, 2)]


@pytest.mark.parametrize(("block_size", "drafts"), SIZES)
def test_every_read_and_every_completed_column_has_the_right_number_of_tokens(
    block_size: int, drafts: int
) -> None:
    run_model(SHIPPED, block_size, drafts)


def run_all(scheme: dict[str, Any]) -> None:
    """The model in all sizes."""
    for block_size, drafts in SIZES:
        run_model(scheme, block_size, drafts)


def _mutate(old: str, new: str) -> dict[str, Any]:
    """Both files with one expression changed; the expression must occur exactly once."""
    text = inspect.getsource(plan) + inspect.getsource(reference)
    text = re.sub(r"^from (__future__|headrace).*$", "", text, flags=re.MULTILINE)
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    namespace: dict[str, Any] = {"__name__": plan.__name__}
    code = compile(text.replace(old, new), "<mutant>", "exec", flags=annotations_flag())
    exec(code, namespace)
    return namespace


def annotations_flag() -> int:
    """Compiler flag of `from __future__ import annotations`."""
    import __future__  # noqa: PLC0415

    return __future__.annotations.compiler_flag


MUTATIONS = {
    "curr without the ceiling": ("ends + block_size - 1, block_size", "ends, block_size"),
    "curr one column late": (
        'block_size - 1, block_size, rounding_mode="floor") - 1',
        'block_size - 1, block_size, rounding_mode="floor")',
    ),
    "curr counts one token too many": ("ends + block_size - 1,", "ends + block_size,"),
    "curr forgets the drafts' column": (
        "ends = computed.to(torch.int64) + scheduled.to(torch.int64)",
        "ends = computed.to(torch.int64) + 1",
    ),
    "move only to the right": ("(previous != current)", "(previous < current)"),
    "move drops column 0": ("(previous >= 0) &", "(previous > 0) &"),
    "bias is accepted": ("offset=accepted - 1,", "offset=accepted,"),
    "bias is accepted - 2": ("offset=accepted - 1,", "offset=(accepted - 2).clamp(min=0),"),
    "the move keeps accepted": (
        "torch.where(copies, torch.ones_like(accepted), accepted)",
        "accepted",
    ),
    "accepted is reset without a move": (
        "torch.where(copies, torch.ones_like(accepted), accepted)",
        "torch.ones_like(accepted)",
    ),
    "running counts the bonus token": ("kept - (accepted - 1)", "kept - accepted"),
    "running forgets a rejected draft": ("kept - (accepted - 1)", "kept - (accepted - 2)"),
    "a boundary on running is missed": ("(offset >= 0)", "(offset > 0)"),
    "a boundary before running is saved": ("(offset >= 0)", "(offset >= -1)"),
    "dst one column late": ("target = column_end - 1", "target = column_end"),
    "dst one column early": ("target = column_end - 1", "target = column_end - 2"),
    "save keeps accepted": ("resets=found & same", "resets=found & same & (offset < 0)"),
    "save resets accepted of another column": ("resets=found & same", "resets=found"),
    "no copy at offset 0": ("~(same & (offset == 0))", "(offset != 0)"),
    "no copy inside a column": ("~(same & (offset == 0))", "~same"),
    "window shifted one too far": (") + shift[:, None]", ") + shift[:, None] + 1"),
    "window not shifted": (") + shift[:, None]", ") + 0 * shift[:, None]"),
    "recurrent state without the offset": (
        "_column(blocks, plan.source + plan.offset)",
        "_column(blocks, plan.source)",
    ),
    "recurrent state one column right": (
        "_column(blocks, plan.source + plan.offset)",
        "_column(blocks, plan.source + plan.offset + 1)",
    ),
    "derived count forgets the bonus": (
        "ends + scheduled - drafts + kept - 1",
        "ends + scheduled - drafts + kept",
    ),
    "derived count ignores drafts": (
        "ends + scheduled - drafts + kept - 1",
        "ends + scheduled + kept - 1",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_error_of_one_in_any_formula_fails_the_model(name: str) -> None:
    scheme = _mutate(*MUTATIONS[name])
    with pytest.raises((ModelMismatchError, RuntimeError)):
        run_all(scheme)


def test_the_worked_example_of_two_steps_gives_its_table() -> None:
    model = Model(SHIPPED, rows=1, block_size=4, drafts=3)
    one, none = torch.tensor([1]), torch.tensor([0])
    model.step(torch.tensor([4]), none, one, derived=False)
    model.step(torch.tensor([2]), none, one, derived=False)
    assert (int(model.state_column), int(model.accepted)) == (1, 1)
    four, three = torch.tensor([4]), torch.tensor([3])
    model.step(four, three, torch.tensor([3]), derived=True)
    assert model.state[0, model.table[0, 1:6].long(), 0].tolist() == [8, 7, 8, 9, 10]
    assert (int(model.computed), int(model.state_column), int(model.accepted)) == (9, 2, 3)
    model.step(four, three, four, derived=True)
    assert model.state[0, model.table[0, 2:7].long(), 0].tolist() == [12, 10, 11, 12, 13]
    assert (int(model.computed), int(model.state_column), int(model.accepted)) == (13, 3, 4)


def test_the_unchanged_formulas_pass_the_same_detour() -> None:
    run_all(_mutate("column_end - 1", "column_end - 1"))
