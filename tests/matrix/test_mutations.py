"""Errors of one in the formulas that the real worker runs, each of which must change some bit.

A mutant is one expression of production code replaced by another. The same small fixed runs pass
with the code as it is. Checkpoints inside generated text are published and compared as well, since
some of these errors show nowhere else.
"""

from __future__ import annotations
import __future__

import inspect
import random
import textwrap
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from conformance import (
    GREEDY,
    VOCAB,
    Case,
    Job,
    assert_checkpoints,
    assert_same_bits,
    drive,
    make_engine,
    script_for,
    small_model,
    solve,
)

from headrace.engine import scheduler
from headrace.engine.draft_policy import DraftPolicy
from headrace.ops.state_columns import plan, reference
from headrace.worker import launches, rows, sampler, state_scheme, worker

if TYPE_CHECKING:
    from headrace.engine.sequence import Sequence

SEED = 7
STEADY, SHORT, RETREAT = 12, 10, 13
"""Lengths of prompts with habits: the first two keep all of 3 and of 2 drafts, so that their runs
end exactly on a boundary; the third keeps none of 3 and drafts none in every other step, so that
its state goes back a column."""
KEPT = {STEADY: 3, SHORT: 2, RETREAT: 0}
COLUMNS = Case(drafts="scripted:3", budget=64)
SYNC = Case(drafts="scripted:3", budget=64, mode="sync")
COMPACT = Case(drafts="scripted:3", budget=64, layout="compact")
REPLAY = Case(drafts="scripted:3", budget=64, scheme="replay:8")
COMPACT_REPLAY = Case(drafts="scripted:3", budget=64, scheme="replay:4", layout="compact")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One expression, replaced wherever callers look the function up.

    Attributes:
        home: Module or class that defines the function.
        function: Its name.
        old, new: The expression, which occurs exactly once, and what takes its place.
        case: The run that must notice.
        seen_in: Where the function is looked up, if not at home.
        prompt: Length of the one prompt to run, if its neighbours would hide the error.
        is_settled_each_step: Whether no row is taken to be steady, which would hide it too.
    """

    home: Any
    function: str
    old: str
    new: str
    case: Case
    seen_in: Any = None
    prompt: int = 0
    is_settled_each_step: bool = False

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = getattr(self.home, self.function)
        source = textwrap.dedent(inspect.getsource(getattr(target, "fn", target)))
        count = source.count(self.old)
        assert count == 1, f"{self.old!r} occurs {count} times in {self.function}"
        module = self.home if isinstance(self.home, ModuleType) else inspect.getmodule(self.home)
        assert module is not None
        namespace = dict(vars(module))
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), "<mutant>", "exec", flags=flags)
        exec(code, namespace)
        monkeypatch.setattr(self.seen_in or self.home, self.function, namespace[self.function])


def move(old: str, new: str) -> Mutant:
    return Mutant(plan, "plan_move", old, new, COLUMNS, reference)


def save(old: str, new: str) -> Mutant:
    return Mutant(plan, "plan_save", old, new, COLUMNS, reference)


def applied(old: str, new: str, case: Case = COMPACT) -> Mutant:
    return Mutant(rows.CompactRows, "apply", old, new, case)


MUTANTS = {
    "the move goes one column too far": move('floor") - 1', 'floor")'),
    "the move forgets the drafts": move("+ scheduled.to(torch.int64)", "+ 1"),
    "the move goes to the right only": Mutant(
        plan, "plan_move", "(previous != current)", "(previous < current)", SYNC, reference),
    "the state never moves": move("active & (previous >= 0)", "active & (previous < 0)"),
    "the bias is accepted": move("offset=accepted - 1", "offset=accepted"),
    "the bias is always 0": move("offset=accepted - 1", "offset=accepted * 0"),
    "accepted survives the move": move(
        "torch.where(copies, torch.ones_like(accepted), accepted)", "accepted"),
    "accepted is reset without a move": move(
        "torch.where(copies, torch.ones_like(accepted), accepted)", "torch.ones_like(accepted)"),
    "running counts one token less": save("kept - (accepted - 1)", "kept - accepted"),
    "running counts one token more": save("kept - (accepted - 1)", "kept - (accepted - 2)"),
    "a boundary at the first kept token is missed": save("(offset >= 0)", "(offset > 0)"),
    "nothing is ever saved": save("(offset >= 0)", "(offset > 99)"),
    "the save goes one column too far": save("target = column_end - 1", "target = column_end"),
    "the save keeps accepted": save("resets=found & same", "resets=found & (offset < 0)"),
    "the save always resets accepted": save("resets=found & same", "resets=found"),
    "a save inside its column is left out": save("~(same & (offset == 0))", "~same"),
    "moves are skipped when the run ends on the boundary": Mutant(
        scheduler.Scheduler, "_settle", "end // unit != base", "(end - 1) // unit != base",
        COLUMNS),
    "moves are skipped after a change of column": Mutant(
        scheduler.Scheduler, "_settle", "may_leave or came", "may_leave", SYNC, prompt=RETREAT,
        is_settled_each_step=True),
    "columns are given up one early": Mutant(
        state_scheme.Columns, "last_released", "(confirmed - 1)", "(confirmed + self.unit - 1)",
        COLUMNS),
    "the column of a finished prompt is one late": Mutant(
        launches, "verify", "torch.div(ends - 1, fixed.unit", "torch.div(ends, fixed.unit",
        Case(drafts="none", budget=64)),
    "computed counts one kept token less": Mutant(
        launches, "verify", '["computed"][:n] + kept', '["computed"][:n] + kept - 1', COLUMNS),
    "one draft too many is kept": Mutant(
        sampler, "count_accepted", ".sum(dim=1) + 1", ".sum(dim=1).add(2).clamp(max=lengths)",
        COLUMNS, launches),
    "the window starts one column late": Mutant(
        launches, "_advance_verify", "column_out[:, None] +", "column_out[:, None] + 1 +", COLUMNS),
    "decisions of the save read the batch's own array": Mutant(
        launches, "save", 'kept = work["kept"][:n]',
        'counts["accepted"].fill_(1); kept = counts["accepted"][rows]', COLUMNS),
    "the base write comes one token late": Mutant(
        launches, "_advance_base", "computed >= write_len", "computed > write_len", REPLAY),
    "the base is never written": Mutant(
        launches, "_advance_base", "computed >= write_len", "computed < 0", REPLAY),
    "the base is always called written": Mutant(
        launches, "_advance_base", "computed >= write_len", "computed >= base_len", REPLAY),
    "base writes are counted from the base": Mutant(
        launches, "_advance_base", 'rounding_mode="floor") * fixed.interval',
        'rounding_mode="floor") * 0 + base_len', REPLAY),
    "the base's column is one late": Mutant(
        launches, "column_block", "length - 1, unit", "length, unit", REPLAY),
    "the base's column is given up": Mutant(
        state_scheme.Replay, "last_released", "confirmed - self.max_pending",
        "confirmed + self.unit", REPLAY),
    "a boundary is published before its base write": Mutant(
        state_scheme.Replay, "completed", "before + 1, self.unit", "before + 5, self.unit", REPLAY),
    "counts are applied by landing row": applied(
        "rows = place[landed]", "rows = landed"),
    "counts of the row before": applied(
        "before + num_sampled[landed]", "before + num_sampled[landed - 1]"),
    "counts of the rows that stay, packed": applied(
        "before + num_sampled[landed]", "before + num_sampled[: len(landed)]"),
    "accepted ignores the save's reset": applied("= accepted[landed]", "= num_sampled[landed]"),
    "the batch's column forgets the drafts": applied(
        "before + scheduled[landed] - 1", "before"),
    "the batch's base comes one token late": applied(
        "before >= write", "before > write", COMPACT_REPLAY),
    "a finished prompt counts one token less": applied(
        "computed[row] = base[row] = end", "computed[row] = base[row] = end - 1"),
    "pending counts are dropped without drafts": Mutant(
        worker.Worker, "_apply", "if previous.has_drafts", "if False", COMPACT),
    "tokens are gathered by the new rows": Mutant(
        rows.CompactRows, "prev_positions", "self._previous.get(seq_id, -1)",
        "self._row.get(seq_id, -1)", COMPACT),
    "a moved row leaves its counts behind": Mutant(
        rows.CompactRows, "_move", "array[target] = array[source]", "pass", COMPACT),
}


class Alternating(DraftPolicy):
    """As many drafts for all rows: always 3, or for RETREAT none in every other step."""

    def __init__(self, prompt: int) -> None:
        super().__init__(3, ridge_tokens=1.0, drafter_cost=0.1)
        self._prompt, self._steps = prompt, 0

    def choose(self, num_rows: int) -> int:
        del num_rows
        self._steps += 1
        return 3 * (self._steps % 2) if self._prompt == RETREAT else 3


@pytest.fixture(scope="module")
def bench() -> tuple[Any, list[Job]]:
    """A fixed model and fixed prompts, long enough to cross columns while generating."""
    model = small_model(SEED)
    rng = random.Random(SEED)
    jobs = []
    for length, count in (
        (5, 30), (STEADY, 26), (SHORT, 26), (RETREAT, 20), (16, 20), (31, 12), (30, 26)
    ):
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        params = replace(GREEDY, max_tokens=count)
        jobs.append(solve(model, Job(prompt, params), states=True))
    return model, jobs


def fixed_run(
    bench: tuple[Any, list[Job]], case: Case, prompt: int = 0, *, is_settled_each_step: bool = False
) -> None:
    """The same arrivals, drafts and acceptances every time."""
    model, jobs = bench
    jobs = [job for job in jobs if prompt in (0, len(job.prompt))]
    rng = random.Random(SEED)
    options = case.options() | {"deterministic": False, "checkpoint_retention": "all"}
    engine = make_engine(model, **options)
    for job in jobs:
        job.script = script_for(job, case.num_drafts, rng) if case.num_drafts else None
        if job.script is not None and len(job.prompt) in KEPT:
            job.script[1][:] = KEPT[len(job.prompt)]

    def drafts(seq: Sequence) -> int:
        if seq.num_prompt_tokens == RETREAT:
            return 3 * (seq.num_steps % 2)
        return KEPT.get(seq.num_prompt_tokens) or rng.choice((0, 1, 3, 3, 3))

    if prompt:
        engine.scheduler.policy = Alternating(prompt)
        if is_settled_each_step:
            engine.scheduler.draft_policy = lambda seq: seq.num_drafts_ready
    else:
        engine.scheduler.draft_policy = drafts
    outputs = drive(engine, jobs, rng, stagger=0.6)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same_bits(job, output)
    assert assert_checkpoints(engine, jobs)


CASES = {"columns": COLUMNS, "synchronous": SYNC, "compact": COMPACT, "replay": REPLAY,
         "compact replay": COMPACT_REPLAY, "no drafts": Case(drafts="none", budget=64)}


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_the_fixed_runs_pass_with_the_code_as_it_is(
    bench: tuple[Any, list[Job]], name: str
) -> None:
    fixed_run(bench, CASES[name])
    for prompt in (RETREAT, STEADY):
        if CASES[name].num_drafts:
            fixed_run(bench, CASES[name], prompt)
            fixed_run(bench, CASES[name], prompt, is_settled_each_step=True)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_of_one_in_the_worker_changes_a_bit(
    bench: tuple[Any, list[Job]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)) as caught:
        fixed_run(
            bench, mutant.case, mutant.prompt, is_settled_each_step=mutant.is_settled_each_step
        )
    print(f"{name}: {str(caught.value)[:200]}")
