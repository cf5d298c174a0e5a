"""Every kernel mutant is killed, and only for its fault."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from headrace.check.kernel_mutants import KERNEL_MUTANTS, KernelMutant, run_mutant
from headrace.check.mutants import registered

pytestmark = pytest.mark.interpreter(detector=False)


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_kernel_mutant_is_killed_in_every_order_and_its_twin_is_clean(
    mutant: KernelMutant,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    outcome = run_mutant(mutant, seed)
    assert outcome.killed, outcome
    assert outcome.twin_clean, outcome
    assert outcome.effect_shown, outcome
    assert outcome.report.startswith(outcome.kind)


def test_the_same_mutant_and_seed_give_the_same_report() -> None:
    assert run_mutant(KERNEL_MUTANTS[0], 7) == run_mutant(KERNEL_MUTANTS[0], 7)


def test_all_kernel_mutants_are_registered() -> None:
    names = {mutant.name for mutant in registered() if mutant.letter == "K"}
    assert names == {mutant.name for mutant in KERNEL_MUTANTS}
    assert len(names) >= 11
