"""Rows of the compact layout: every value stays with its sequence, whatever moves."""

from __future__ import annotations

import random
import secrets

import numpy as np

from headrace.worker.rows import COUNT_NAMES, CompactRows, ProducerMap

UNIT, INTERVAL = 16, 4


def known(seq_id: int, end: int) -> ProducerMap:
    """A step in which one prompt ended."""
    return ProducerMap(seq_ids=(seq_id,), num_verify=0, known_ends=(end,), num_scheduled=())


def counts_of(rows: CompactRows, seq_id: int) -> tuple[int, ...]:
    return tuple(int(rows.counts[name][rows.row(seq_id)]) for name in COUNT_NAMES)


def test_a_hole_is_filled_by_the_last_row_with_all_its_counts() -> None:
    rows = CompactRows(4, UNIT, INTERVAL)
    rows.begin_step((), (1, 2, 3))
    for seq_id, end in ((1, 5), (2, 20), (3, 40)):
        rows.apply(known(seq_id, end), np.zeros(1, int), np.zeros(1, int))
    rows.begin_step((1,), ())
    assert rows.seq_ids == [3, 2]
    assert counts_of(rows, 3) == (40, 1, 2, 40)
    assert counts_of(rows, 2) == (20, 1, 1, 20)
    assert rows.prev_positions().tolist() == [2, 1]


def test_b48_counts_of_a_step_are_applied_through_its_own_map() -> None:
    rows = CompactRows(4, UNIT, INTERVAL)
    rows.begin_step((), (1, 2, 3, 4))
    for seq_id in (1, 2, 3, 4):
        rows.apply(known(seq_id, 10), np.zeros(1, int), np.zeros(1, int))
    produced = ProducerMap(
        seq_ids=(1, 2, 3, 4), num_verify=4, known_ends=(), num_scheduled=(4, 4, 4, 4)
    )
    rows.begin_step((1,), (5,))  # Row 0 has another tenant before the counts arrive.
    rows.apply(produced, np.array([1, 4, 2, 3]), np.array([1, 4, 2, 3]))
    assert {seq: counts_of(rows, seq)[:2] for seq in (2, 3, 4, 5)} == {
        2: (14, 4), 3: (12, 2), 4: (13, 3), 5: (0, 1),
    }


def test_a_step_without_drafts_needs_no_counts() -> None:
    rows = CompactRows(2, UNIT, INTERVAL)
    rows.begin_step((), (1,))
    rows.apply(known(1, 15), np.zeros(1, int), np.zeros(1, int))
    step = ProducerMap(seq_ids=(1,), num_verify=1, known_ends=(), num_scheduled=(1,))
    rows.apply(step, None, None)
    assert counts_of(rows, 1) == (16, 1, 0, 15)
    rows.apply(step, None, None)
    assert counts_of(rows, 1) == (17, 1, 1, 16)


def test_results_of_a_sequence_that_left_and_came_back_do_not_stick() -> None:
    rows = CompactRows(2, UNIT, INTERVAL)
    rows.begin_step((), (1,))
    rows.apply(known(1, 30), np.zeros(1, int), np.zeros(1, int))
    step = ProducerMap(seq_ids=(1,), num_verify=1, known_ends=(), num_scheduled=(4,))
    rows.begin_step((1,), (1,))
    rows.apply(step, np.array([3]), np.array([3]))
    rows.apply(known(1, 30), np.zeros(1, int), np.zeros(1, int))
    assert counts_of(rows, 1) == (30, 1, 1, 30)


def test_a_fork_inherits_counts_and_previous_row_even_if_its_parent_leaves() -> None:
    rows = CompactRows(4, UNIT, INTERVAL)
    rows.begin_step((), (1, 2))
    rows.apply(known(2, 21), np.zeros(1, int), np.zeros(1, int))
    rows.begin_step((2,), (3, 4), ((2, 3), (3, 4)))
    assert counts_of(rows, 3) == counts_of(rows, 4) == (21, 1, 1, 21)
    assert [rows.prev_positions()[rows.row(seq)] for seq in (3, 4)] == [1, 1]


def test_random_traffic_keeps_every_value_with_its_sequence() -> None:
    """B62: leave, enter and step in random order against a dictionary, 1000 operations."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows, model, next_id = CompactRows(6, UNIT, INTERVAL), dict[int, tuple[int, int]](), 1
    device = [-1] * 6
    for _ in range(1000):
        left = tuple(seq for seq in model if rng.random() < 0.2)
        for seq in left:
            del model[seq]
        room = 6 - len(model)
        entered = tuple(range(next_id, next_id + rng.randint(0, room)))
        next_id += len(entered)
        rows.begin_step(left, entered)
        device = [
            device[previous] if previous >= 0 else seq
            for previous, seq in zip(rows.prev_positions(), rows.seq_ids, strict=True)
        ]
        assert device == rows.seq_ids, "gathering by the map lost a row"
        for seq in entered:
            end = rng.randint(1, 50)
            rows.apply(known(seq, end), np.zeros(1, int), np.zeros(1, int))
            model[seq] = (end, 1)
        chosen = [seq for seq in model if rng.random() < 0.6]
        rng.shuffle(chosen)
        kept = np.array([rng.randint(1, 4) for _ in chosen], dtype=np.int64)
        step = ProducerMap(
            seq_ids=tuple(chosen), num_verify=len(chosen), known_ends=(),
            num_scheduled=(4,) * len(chosen),
        )
        rows.apply(step, kept, kept)
        for seq, count in zip(chosen, kept.tolist(), strict=True):
            model[seq] = (model[seq][0] + count, count)
        assert sorted(rows.seq_ids) == sorted(model)
        for seq, values in model.items():
            assert counts_of(rows, seq)[:2] == values
