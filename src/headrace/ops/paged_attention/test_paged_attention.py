"""Attention over KV blocks: the definition, the bits of a query, and what must not be read."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from headrace.ops.paged_attention import attend_chunk, attend_rows, key_rows, write_kv
from headrace.ops.paged_attention.reference import attend_reference

P = 16


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
    return random.Random(seed)


class Pools:
    """Pools full of NaN with the given sequences in shuffled blocks."""

    def __init__(self, lengths: list[int], heads: int, dim: int, rng: random.Random) -> None:
        self.lengths = lengths
        width = max(-(-n // P) for n in lengths)
        total = 1 + sum(-(-n // P) for n in lengths)
        free = list(range(1, total + 3))
        rng.shuffle(free)
        self.k, self.v = (torch.full((total + 3, P, heads, dim), torch.nan) for _ in range(2))
        tables, slots = [], []
        for n in lengths:
            table = [free.pop() for _ in range(-(-n // P))]
            slots += [table[p // P] * P + p % P for p in range(n)]
            tables.append(table + [0] * (width - len(table)))
        self.tables = torch.tensor(tables, dtype=torch.int32)
        tokens = sum(lengths)
        key, value = torch.randn(tokens, heads, dim), torch.randn(tokens, heads, dim)
        write_kv(self.k, self.v, key, value, torch.tensor(slots))
        self.heads = heads

    def attend(
        self, query: Tensor, which: list[int], query_len: int, window: int | None = None
    ) -> Tensor:
        """Attend from the last tokens of some sequences, query [all, Q, H, D]."""
        lens = torch.tensor([self.lengths[i] for i in which])
        most = int(lens.max())
        rows = key_rows(self.tables[which], lens, most, P, self.heads)
        positions = lens[:, None] - query_len + torch.arange(query_len)
        return attend_rows(query[which], self.k, self.v, rows, positions, window=window)


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (1, 8), (2, 3)])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_rows_agree_with_the_definition(
    rng: random.Random, heads: int, group: int, window: int | None
) -> None:
    lengths = [1 + 3, 16 + 3, 63 + 3, 64 + 3, 200]
    pools = Pools(lengths, heads, 8, rng)
    query = torch.randn(5, 4, heads * group, 8)
    got = pools.attend(query, list(range(5)), 4, window)
    for n, length in enumerate(lengths):
        for t in range(4):
            table, at = pools.tables[n], length - 4 + t
            want = attend_reference(query[n, t], pools.k, pools.v, table, at, window)
            assert torch.allclose(got[n, t].double(), want, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2])
def test_results_are_contiguous_whatever_the_grouping(rng: random.Random, group: int) -> None:
    # A layer takes the heads as columns of one matrix; a step may be a single known row.
    pools = Pools([40], 4, 8, rng)
    query = torch.randn(1, 16, 4 * group, 8)
    assert pools.attend(query, [0], 16).is_contiguous()
    rows = key_rows(pools.tables, torch.tensor([40]), 40, P, 4)
    assert attend_chunk(query[0], pools.k, pools.v, rows, 24).is_contiguous()


@pytest.mark.parametrize(
    ("heads", "group", "window"), [(1, 1, None), (2, 2, None), (2, 5, None), (2, 2, 70)]
)
def test_a_query_has_the_same_bits_in_any_batch_and_with_any_drafts(
    rng: random.Random, heads: int, group: int, window: int | None
) -> None:
    pools = Pools([rng.randrange(9, 400) for _ in range(8)], heads, 16, rng)
    query = torch.randn(8, 8, heads * group, 16)
    whole = pools.attend(query, list(range(8)), 8, window)
    for _ in range(10):
        which = rng.sample(range(8), rng.randrange(1, 9))
        assert torch.equal(pools.attend(query, which, 8, window), whole[which])
    for q_len in (1, 3):
        last = pools.attend(query[:, -q_len:], list(range(8)), q_len, window)
        assert torch.equal(last, whole[:, -q_len:])


@pytest.mark.parametrize(("group", "window"), [(1, None), (3, None), (3, 1), (2, 70)])
def test_a_chunk_agrees_with_the_definition_and_has_the_same_bits_split(
    rng: random.Random, group: int, window: int | None
) -> None:
    pools = Pools([300], 2, 8, rng)
    query = torch.randn(300, 2 * group, 8)

    def run(start: int, end: int) -> Tensor:
        rows = key_rows(pools.tables, torch.tensor([end]), end, P, 2)
        return attend_chunk(query[start:end], pools.k, pools.v, rows, start, window=window)

    whole = run(0, 300)
    for position in (0, 1, 63, 64, 65, 299):
        table = pools.tables[0]
        want = attend_reference(query[position], pools.k, pools.v, table, position, window)
        assert torch.allclose(whole[position].double(), want, atol=1e-5)
    cuts = sorted({0, 300, *(rng.randrange(1, 300) for _ in range(3))})
    parts = [run(a, b) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_padding_tokens_write_nowhere(rng: random.Random) -> None:
    pools = Pools([20], 2, 8, rng)
    before = pools.k.clone()
    write_kv(pools.k, pools.v, torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.zeros(3).long())
    assert torch.equal(pools.k.view(torch.int32), before.view(torch.int32))


def test_a_row_without_tokens_disturbs_nobody(rng: random.Random) -> None:
    pools = Pools([40, 30], 2, 8, rng)
    query = torch.randn(2, 1, 4, 8)
    alone = pools.attend(query, [0], 1)
    tables = torch.stack([pools.tables[0], torch.zeros_like(pools.tables[0])])
    lens = torch.tensor([40, 0])
    rows = key_rows(tables, lens, 40, P, 2)
    got = attend_rows(query, pools.k, pools.v, rows, torch.tensor([[39], [0]]))
    assert torch.equal(got[:1], alone)
