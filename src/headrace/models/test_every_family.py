"""The same bits whatever shares a step: mates, order, chunks, drafts, schemes, recomputation.

Every test runs for every family of `headrace.testing.TINY_DICTS`, most of them for some only by
`-m full`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.models.batch import (
    ROW_TILE,
    Caches,
    ColumnsMetadata,
    KnownRow,
    KnownState,
    ReplayMetadata,
    StateCache,
    StepBatch,
    VerifyRows,
)
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import ReferenceRun, run_reference
from headrace.models.registry import model_class
from headrace.testing import TINY_DICTS, random_weights, tiny_family

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.models.model import HybridModel

P = 4
"""Tokens per KV block: small, so that tables are long and every run has several blocks."""

MAX_DRAFTS = 3
RING = 32


RELATIVES = {
    "bamba": ("A", "columns"),
    "falcon_h1": ("A", "replay"),
    "jamba": ("B", "columns"),
    "lfm2_moe": ("A", "replay"),
    "mamba": ("A", "columns"),
    "mamba2": ("B", "replay"),
    "nemotron_h": ("B", "replay"),
    "zamba2": ("B", "columns"),
}
"""Families whose arithmetic is another's in another order: what they run by default."""


def family_params() -> list[Any]:
    """All families; relatives are marked."""
    return [
        pytest.param(name, marks=pytest.mark.full if name in RELATIVES else ())
        for name in sorted(TINY_DICTS)
    ]


def mixtures() -> list[Any]:
    """Every family with both kinds of weights and both schemes; for relatives one is not marked."""
    return [
        pytest.param(
            *(name, variant, scheme),
            marks=pytest.mark.full
            if RELATIVES.get(name, (variant, scheme)) != (variant, scheme)
            else (),
        )
        for name in sorted(TINY_DICTS)
        for variant in "AB"
        for scheme in ("columns", "replay")
    ]


@pytest.fixture(params=family_params())
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def seed() -> int:
    """Draw a fresh seed and print it."""
    value = random.SystemRandom().randrange(2**31)
    print(f"{value=}")
    return value


@dataclass
class Stream:
    """One sequence: its true tokens, what is computed, its blocks, and the logits it got."""

    tokens: list[int]
    prompt_len: int
    table: list[int]
    columns: list[int]
    base: list[int]
    ring_block: int
    computed: int = 0
    accepted: int = 1
    base_len: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Chunk:
    """A known row to run: tokens start .. end of a stream."""

    stream: Stream
    end: int
    path: str = "scan"
    exports: tuple[tuple[int, int], ...] = ()
    source: int | None = None


class Bench:
    """A worker in small: pools full of NaN, shuffled blocks, any mixture of rows in a step."""

    def __init__(
        self, model: HybridModel, rng: random.Random, *, scheme: str = "columns", interval: int = 4
    ) -> None:
        self.model, self.rng, self.scheme, self.interval = model, rng, scheme, interval
        config = model.config
        self.free_kv = list(range(1, 1200))
        self.free_state = list(range(1, 100))
        self.free_rings = list(range(1, 30))
        for pool in (self.free_kv, self.free_state, self.free_rings):
            rng.shuffle(pool)
        k, v = (
            torch.full(
                (model.num_kv_layers, 1200, P, config.num_kv_heads, config.head_dim), torch.nan
            )
            for _ in range(2)
        )
        groups = []
        for spec in model.state_groups(MAX_DRAFTS):
            layers = len(spec.layers)
            state = {s.name: torch.full((layers, 100, *s.shape), torch.nan) for s in spec.state}
            ring = {s.name: torch.full((layers, 30, RING, *s.shape), torch.nan) for s in spec.ring}
            groups.append(StateCache(state=state, ring=ring if scheme == "replay" else {}))
        self.caches = Caches(k=k, v=v, groups=tuple(groups))

    def stream(self, tokens: list[int], prompt_len: int) -> Stream:
        blocks = -(-(len(tokens) + MAX_DRAFTS) // P)
        return Stream(
            tokens=tokens,
            prompt_len=prompt_len,
            table=[self.free_kv.pop() for _ in range(blocks)],
            columns=[self.free_state.pop() for _ in range(1 + MAX_DRAFTS)],
            base=[self.free_state.pop() for _ in range(2)],
            ring_block=self.free_rings.pop(),
        )

    def running_block(self, stream: Stream) -> int:
        return stream.columns[0] if self.scheme == "columns" else stream.base[0]

    def step(
        self,
        verify: list[tuple[Stream | None, list[int]]],
        known: list[Chunk],
        *,
        grid: int = 16,
    ) -> tuple[StepBatch, Tensor]:
        """Run one step; each generating row brings its next true token and the given drafts."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []

        def put(stream: Stream, token: int, position: int) -> None:
            token_ids.append(token)
            positions.append(position)
            slots.append(stream.table[position // P] * P + position % P)

        rows = None
        if verify:
            rows = self._verify_rows(verify, put, token_ids)
        known_rows = []
        for chunk in known:
            stream = chunk.stream
            start = stream.computed
            known_rows.append(self._known_row(chunk, len(token_ids)))
            for position in range(start, chunk.end):
                put(stream, stream.tokens[position], position)
        real = len(token_ids)
        padding = -real % ROW_TILE
        batch = StepBatch(
            num_tokens=real,
            token_ids=torch.tensor(token_ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            kv_slot_mapping=torch.tensor(slots + [0] * padding),
            verify=rows,
            known=tuple(known_rows),
            scan_grid=grid,
        )
        hidden = self.model.forward(batch, self.caches)
        self._finish(batch, hidden, verify, known)
        self._check_null_blocks()
        return batch, hidden

    def _verify_rows(
        self,
        verify: list[tuple[Stream | None, list[int]]],
        put: Callable[[Stream, int, int], None],
        token_ids: list[int],
    ) -> VerifyRows:
        q_len = max(1 + len(drafts) for _, drafts in verify)
        index, lens, seq_lens, tables, meta = [], [], [], [], []
        width = max(len(s.table) for s, _ in verify if s is not None)
        for stream, drafts in verify:
            if stream is None:
                index.append([0] * q_len)
                lens.append(0)
                seq_lens.append(0)
                tables.append([0] * width)
                meta.append([*([0] * (1 + MAX_DRAFTS)), 1, 0, 0, 0, 0, 0, 0])
                continue
            first = len(token_ids)
            row = [stream.tokens[stream.computed], *drafts]
            for t, token in enumerate(row):
                put(stream, token, stream.computed + t)
            index.append([first + t if t < len(row) else 0 for t in range(q_len)])
            lens.append(len(row))
            seq_lens.append(stream.computed + len(row))
            tables.append(stream.table + [0] * (width - len(stream.table)))
            write_len = (stream.base_len // self.interval + 1) * self.interval
            fresh = stream.base[1] if self.rng.random() < 0.5 else stream.base[0]
            meta.append(
                [
                    *stream.columns,
                    stream.accepted,
                    stream.base[0],
                    stream.base_len,
                    stream.computed,
                    fresh,
                    write_len,
                    stream.ring_block,
                ]
            )
            if self.scheme == "replay" and stream.computed >= write_len:
                if fresh == stream.base[1]:
                    stream.base.reverse()
                stream.base_len = write_len
        m = torch.tensor(meta)
        c = 1 + MAX_DRAFTS
        state: ColumnsMetadata | ReplayMetadata
        if self.scheme == "columns":
            state = ColumnsMetadata(window_blocks=m[:, :c].int(), accepted=m[:, c].int())
        else:
            pending = int((m[:, c + 3] - m[:, c + 2]).max())
            state = ReplayMetadata(
                base_block=m[:, c + 1].int(),
                base_len=m[:, c + 2],
                computed=m[:, c + 3],
                write_block=m[:, c + 4].int(),
                write_len=m[:, c + 5],
                ring_block=m[:, c + 6].int(),
                max_pending=pending + self.rng.randrange(2),
                interval=self.interval,
            )
        return VerifyRows(
            num_rows=len(verify),
            max_query_len=q_len,
            token_index=torch.tensor(index),
            query_lens=torch.tensor(lens),
            seq_lens=torch.tensor(seq_lens),
            max_seq_len=max(seq_lens),
            block_table=torch.tensor(tables, dtype=torch.int32),
            states=(state,),
        )

    def _known_row(self, chunk: Chunk, offset: int) -> KnownRow:
        stream = chunk.stream
        running = self.running_block(stream)
        source = chunk.source if chunk.source is not None else running
        return KnownRow(
            path=chunk.path,  # type: ignore[arg-type]
            token_offset=offset,
            start=stream.computed,
            length=chunk.end - stream.computed,
            block_table=torch.tensor(stream.table, dtype=torch.int32),
            states=(
                KnownState(
                    source_block=source if stream.computed else None,
                    target_block=running,
                    exports=chunk.exports,
                ),
            ),
        )

    def _finish(
        self,
        batch: StepBatch,
        hidden: Tensor,
        verify: list[tuple[Stream | None, list[int]]],
        known: list[Chunk],
    ) -> None:
        logits = self.model.logits(hidden)
        at = 0
        for stream, drafts in verify:
            if stream is None:
                continue
            kept = 1
            true = stream.tokens[stream.computed + 1 :]
            while kept <= len(drafts) and drafts[kept - 1 : kept] == true[kept - 1 : kept]:
                kept += 1
            for t in range(kept):
                stream.logits[stream.computed + t] = logits[at + t]
            at += 1 + len(drafts)
            stream.accepted = kept
            stream.computed += kept
        for chunk in known:
            length = chunk.end - chunk.stream.computed
            for t in range(length):
                chunk.stream.logits[chunk.stream.computed + t] = logits[at + t]
            at += length
            chunk.stream.computed = chunk.stream.base_len = chunk.end
            chunk.stream.accepted = 1
        assert at == batch.num_tokens

    def _check_null_blocks(self) -> None:
        pools = [self.caches.k, self.caches.v]
        for group in self.caches.groups:
            pools += [*group.state.values(), *group.ring.values()]
        for pool in pools:
            assert bool(pool[:, 0].isnan().all()), "the null block was written"


def drafts_for(stream: Stream, rng: random.Random, vocab: int) -> list[int]:
    """Draw drafts of which a random number are right."""
    left = len(stream.tokens) - stream.computed - 1
    count = min(rng.randrange(MAX_DRAFTS + 1), left)
    drafts = stream.tokens[stream.computed + 1 : stream.computed + 1 + count]
    right = rng.randrange(count + 1)
    return drafts[:right] + [rng.randrange(vocab) for _ in range(count - right)]


def forced_reference(model: HybridModel, stream: Stream, grid: int = 16) -> ReferenceRun:
    """Run the reference loop over the stream's own tokens."""
    total = len(stream.tokens)
    return run_reference(
        model,
        stream.tokens[: stream.prompt_len],
        total - stream.prompt_len + 1,
        choose=lambda _, position: stream.tokens[position] if position < total else 0,
        states_at=(total,),
        scan_grid=grid,
    )


def assert_same_bits(stream: Stream, reference: ReferenceRun) -> None:
    for i in range(len(stream.tokens) - stream.prompt_len + 1):
        position = stream.prompt_len - 1 + i
        got = stream.logits[position]
        assert torch.equal(got, reference.logits[i]), (
            f"{position=} differs by {(got - reference.logits[i]).abs().max()}"
        )


def random_streams(bench: Bench, count: int, rng: random.Random) -> list[Stream]:
    vocab = bench.model.config.vocab_size
    streams = []
    for _ in range(count):
        prompt, total = rng.randrange(1, 70), rng.randrange(5, 40)
        tokens = [rng.randrange(vocab) for _ in range(prompt + total)]
        streams.append(bench.stream(tokens, prompt))
    return streams


def run_all(
    bench: Bench, streams: list[Stream], rng: random.Random, *, drafts: bool = True
) -> None:
    """Run all streams to their end in steps of random composition."""
    vocab = bench.model.config.vocab_size
    while any(s.computed < len(s.tokens) for s in streams):
        verify: list[tuple[Stream | None, list[int]]] = []
        known = []
        for stream in rng.sample(streams, len(streams)):
            if stream.computed >= len(stream.tokens) or rng.random() < 0.2:
                continue
            if stream.computed < stream.prompt_len:
                end = stream.prompt_len
                if rng.random() < 0.5:
                    end = min(end, (stream.computed // 16 + rng.randrange(1, 4)) * 16)
                known.append(Chunk(stream, end))
            else:
                verify.append((stream, drafts_for(stream, rng, vocab) if drafts else []))
        if verify and rng.random() < 0.5:
            verify.insert(rng.randrange(len(verify) + 1), (None, []))
        if verify or known:
            bench.step(verify, known)


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "variant", "scheme"), mixtures())
def test_every_row_has_the_bits_of_the_reference_loop(
    name: str, seed: int, variant: str, scheme: str
) -> None:
    rng = random.Random(seed)
    model = tiny_family(name, seed, variant)  # type: ignore[arg-type]
    bench = Bench(model, rng, scheme=scheme, interval=rng.choice([4, 5, 8]))
    streams = random_streams(bench, 4, rng)
    run_all(bench, streams, rng)
    for stream in streams:
        assert_same_bits(stream, forced_reference(model, stream))


def test_final_states_equal_the_reference_loops(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng)
    streams = random_streams(bench, 4, rng)
    run_all(bench, streams, rng)
    for stream in streams:
        reference = forced_reference(model, stream).states[len(stream.tokens)][0]
        state = bench.caches.groups[0].state
        bias = stream.accepted - 1
        if "window" in reference:
            carried = reference["window"].shape[1]
            window = state["window"][:, stream.columns[0], bias : bias + carried]
            assert torch.equal(window, reference["window"])
        if "recurrent" in reference:
            assert torch.equal(state["recurrent"][:, stream.columns[bias]], reference["recurrent"])


def test_exported_states_equal_those_of_a_prompt_that_ends_there(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng)
    tokens = [rng.randrange(160) for _ in range(75)]
    whole, mate = bench.stream(tokens, 75), bench.stream(tokens[3:], 72)
    blocks = [bench.free_state.pop() for _ in range(2)]
    exports = ((16, blocks[0]), (48, blocks[1]))
    bench.step([], [Chunk(mate, 40), Chunk(whole, 75, exports=exports)])
    for position, block in exports:
        short = bench.stream(tokens[:position], position)
        bench.step([], [Chunk(short, position)])
        for name, pool in bench.caches.groups[0].state.items():
            a, b = pool[:, block], pool[:, short.columns[0]]
            if name == "window":
                carried = a.shape[1] - MAX_DRAFTS
                a, b = a[:, :carried], b[:, :carried]
            assert torch.equal(a, b), name


def test_a_prompt_that_starts_from_a_checkpoint_has_the_same_bits(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng)
    tokens = [rng.randrange(160) for _ in range(70)]
    first, second = bench.stream(tokens, 70), bench.stream(tokens, 70)
    block = bench.free_state.pop()
    bench.step([], [Chunk(first, 70, exports=((32, block),))])
    second.table[: 32 // P] = first.table[: 32 // P]
    second.computed = 32
    bench.step([], [Chunk(second, 70, source=block)])
    for position in range(32, 70):
        assert torch.equal(first.logits[position], second.logits[position])


@pytest.mark.thinned
@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_recomputed_tokens_have_the_bits_that_generating_them_gave(
    family: str, seed: int, scheme: str
) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng, scheme=scheme)
    streams = random_streams(bench, 3, rng)
    victim = streams[0]
    run_all(bench, streams, rng)
    before = dict(victim.logits)
    victim.computed, victim.accepted = 0, 1
    victim.logits.clear()
    mate = bench.stream([rng.randrange(160) for _ in range(50)], 50)
    bench.step([], [Chunk(mate, 16), Chunk(victim, victim.prompt_len)])
    middle = rng.randrange(victim.prompt_len + 1, len(victim.tokens))
    bench.step([], [Chunk(victim, middle, path="step"), Chunk(mate, 48)])
    bench.step([], [Chunk(victim, len(victim.tokens) - 1, path="step")] if rng.random() < 0.5
               and middle < len(victim.tokens) - 1 else [Chunk(mate, 50)])  # fmt: skip
    run_all(bench, [victim], rng)
    assert before.keys() == victim.logits.keys()
    for position, logits in before.items():
        assert torch.equal(victim.logits[position], logits), position


@pytest.mark.thinned
@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_rows_without_tokens_or_blocks_change_nothing(family: str, seed: int, scheme: str) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng, scheme=scheme)
    streams = random_streams(bench, 2, rng)
    for stream in streams:
        bench.step([], [Chunk(stream, stream.prompt_len)])
    bench.step([(streams[0], []), (streams[1], [])], [])
    pools = {
        **bench.caches.groups[0].state,
        **{f"ring_{name}": pool for name, pool in bench.caches.groups[0].ring.items()},
    }
    before = {name: pool.clone() for name, pool in pools.items()}
    idle = streams[1]
    c = 1 + MAX_DRAFTS
    tables = torch.tensor([idle.table], dtype=torch.int32)
    state: ColumnsMetadata | ReplayMetadata
    cases: list[ColumnsMetadata | ReplayMetadata]
    if scheme == "columns":
        columns = torch.tensor([idle.columns], dtype=torch.int32)
        cases = [
            ColumnsMetadata(window_blocks=columns, accepted=torch.tensor([0], dtype=torch.int32)),
            ColumnsMetadata(
                window_blocks=torch.zeros(1, c, dtype=torch.int32),
                accepted=torch.tensor([1], dtype=torch.int32),
            ),
        ]
    else:
        null, base, ring = (
            torch.tensor([block], dtype=torch.int32) for block in (0, idle.base[0], idle.ring_block)
        )
        lens = {
            "base_len": torch.tensor([idle.base_len]),
            "computed": torch.tensor([idle.computed]),
            "write_len": torch.tensor([idle.base_len + 1]),
            "max_pending": 3,
            "interval": 1,
        }
        cases = [
            ReplayMetadata(base_block=null, write_block=null, ring_block=ring, **lens),  # type: ignore[arg-type]
            ReplayMetadata(base_block=base, write_block=base, ring_block=null, **lens),  # type: ignore[arg-type]
        ]
    for state in cases:
        for length in (0, 1):
            rows = VerifyRows(
                num_rows=1,
                max_query_len=1,
                token_index=torch.zeros(1, 1, dtype=torch.long),
                query_lens=torch.tensor([length]),
                seq_lens=torch.tensor([idle.computed + length]),
                max_seq_len=idle.computed + 1,
                block_table=tables,
                states=(state,),
            )
            batch = StepBatch(
                num_tokens=length,
                token_ids=torch.zeros(ROW_TILE, dtype=torch.long),
                positions=torch.zeros(ROW_TILE, dtype=torch.long),
                kv_slot_mapping=torch.zeros(ROW_TILE, dtype=torch.long),
                verify=rows,
                known=(),
                scan_grid=16,
            )
            model.forward(batch, bench.caches)
            for name, pool in pools.items():
                assert torch.equal(pool.view(torch.int32), before[name].view(torch.int32)), name


def test_erasing_the_state_changes_the_logits(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_family(family, seed)
    bench = Bench(model, rng)
    tokens = [rng.randrange(160) for _ in range(65)]
    kept, erased = bench.stream(tokens, 64), bench.stream(tokens, 64)
    bench.step([], [Chunk(kept, 64), Chunk(erased, 64)])
    state = bench.caches.groups[0].state
    state["recurrent" if "recurrent" in state else "window"][:, erased.columns[0]] = 0.0
    bench.step([(kept, []), (erased, [])], [])
    change = (kept.logits[64] - erased.logits[64]).abs().max()
    # A window may be all that there is, and of two inputs.
    least = 0.1 if "recurrent" in state else 0.03
    assert change > least, "the state does not matter in this model: the tests are blind"


def test_bfloat16_stays_near_float32(family: str, seed: int) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family]())
    weights = random_weights(config, seed)
    rng = random.Random(seed)
    prompt = [rng.randrange(160) for _ in range(40)]
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_class(config).from_weights(config, weights, dtype)
        assert model.dtype == dtype
        runs.append(run_reference(model, prompt, 4, choose=lambda _, position: position))
    # The median: a token that rounding sends to another expert has other logits.
    error = (runs[0].logits - runs[1].logits).abs().median() / runs[0].logits.std()
    assert error < 0.5
