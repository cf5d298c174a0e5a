"""Bias, penalties and masks against a loop over tokens, and rules that follow their rows."""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace import rt
from headrace.sampling_params import SamplingParams
from headrace.worker.logit_rules import (
    ALWAYS,
    LogitRules,
    RuledRow,
    RulesShape,
    RulesStage,
    apply_rules,
    pack_rules,
    penalise,
)
from headrace.worker.step import NewSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

V, P = 40, 4


def fresh(name: str = "seed") -> random.Random:
    seed = secrets.randbits(32)
    print(f"{name} {seed}")
    return random.Random(seed)


def sequence(
    prompt: int, *, stop_ids: tuple[int, ...] = (), bad_words: tuple[tuple[int, ...], ...] = (),
    slot: int = 0, **params: Any,  # noqa: ANN401
) -> NewSequence:
    return NewSequence(
        seq_id=1, slot=slot, params=SamplingParams(max_tokens=99, **params), seed=0,
        stop_ids=stop_ids, num_prompt_tokens=prompt, token_ids=np.zeros(prompt, dtype=np.int64),
        bad_words=bad_words,
    )


def naive(new: NewSequence, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
    """What the parameters say, one entry after the other, in float32."""
    params, output = new.params, list(history[new.num_prompt_tokens :])
    out = logits.astype(np.float32).copy()
    for token in range(V):
        value = out[token]
        if params.logit_bias and token in params.logit_bias:
            value = value + np.float32(params.logit_bias[token])
        if token in history:
            rate = np.float32(params.repetition_penalty)
            value = value / rate if value > 0 else value * rate
        value = value - np.float32(params.frequency_penalty) * np.float32(output.count(token))
        value = value - np.float32(params.presence_penalty) * np.float32(token in output)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = np.float32(-np.inf)
        if token in new.stop_ids and len(output) < params.min_tokens:
            value = np.float32(-np.inf)
        for word in new.bad_words:
            before = list(word[:-1])
            if token == word[-1] and output[len(output) - len(before) :] == before:
                value = np.float32(-np.inf)
        out[token] = value
    return out


def random_sequence(draw: random.Random, prompt: int) -> NewSequence:
    """A sequence with any mixture of parameters, often none."""
    def maybe(value: Any, neutral: Any) -> Any:  # noqa: ANN401
        return value if draw.random() < 0.4 else neutral

    some = draw.sample(range(V), 12)
    return sequence(
        prompt,
        stop_ids=tuple(some[:2]),
        bad_words=maybe(
            tuple(
                tuple(draw.choices(some[2:5], k=draw.choice((1, 2, 2, 3)))) for _ in range(3)
            ), (),
        ),
        min_tokens=maybe(draw.randrange(1, 9), 0),
        repetition_penalty=maybe(draw.uniform(0.5, 2.0), 1.0),
        frequency_penalty=maybe(draw.uniform(-2, 2), 0.0),
        presence_penalty=maybe(draw.uniform(-2, 2), 0.0),
        logit_bias=maybe({t: draw.uniform(-100, 100) for t in draw.sample(range(V), 4)}, None),
        allowed_token_ids=maybe(tuple(some[2:]), None),
    )


class Bench:
    """Rows with random histories of few tokens, scattered over a pool of blocks."""

    def __init__(self, draw: random.Random, rows: int) -> None:
        self.tokens = torch.randint(0, V, (200, P))
        blocks = draw.sample(range(1, 200), 199)
        tables: list[int] = []
        self.sequences: list[NewSequence] = []
        self.histories: list[list[int]] = []
        self.rows: list[RuledRow] = []
        self.owners: list[tuple[int, int]] = []
        self.positions: list[int] = []
        for row in range(rows):
            prompt = draw.randrange(1, 12)
            new = random_sequence(draw, prompt)
            few = [*(w for word in new.bad_words for w in word), *draw.sample(range(V), 3)]
            samples = draw.randrange(1, 4)
            length = prompt + draw.randrange(0, 9) + samples - 1
            history = draw.choices(few, k=length)
            width = -(-length // P) + draw.randrange(0, 2)
            table = [blocks.pop() for _ in range(width)]
            for place, token in enumerate(history):
                self.tokens[table[place // P], place % P] = token
            self.sequences.append(new)
            self.histories.append(history)
            rules = LogitRules.of(new)
            if rules is not None:
                self.rows.append(
                    RuledRow(
                        rules=rules, first_sample=len(self.positions), num_samples=samples,
                        table_start=len(tables), table_width=width,
                    )
                )
            for sample in range(samples):
                self.owners.append((row, length - samples + 1 + sample))
                self.positions.append(length - samples + 1 + sample)
            tables += table
        self.tables = torch.tensor(tables, dtype=torch.int32)


def test_every_sample_position_equals_the_naive_loop() -> None:
    draw = fresh()
    torch.manual_seed(draw.randrange(2**31))
    for _ in range(20):
        bench = Bench(draw, 14)
        logits = torch.randn(len(bench.positions), V) * 3
        rows = sorted(bench.rows, key=lambda row: not row.rules.has_penalties)
        values, shape = pack_rules(rows, V)
        before = logits.clone()
        out = apply_rules(
            logits, torch.tensor(bench.positions), bench.tokens, bench.tables,
            {name: torch.from_numpy(value) for name, value in values.items()}, shape,
        )
        assert torch.equal(logits, before)
        for place, (row, length) in enumerate(bench.owners):
            expected = naive(
                bench.sequences[row], logits[place].numpy(), bench.histories[row][:length]
            )
            assert np.array_equal(out[place].numpy(), expected), (row, bench.sequences[row].params)


def test_penalties_equal_a_naive_count() -> None:
    draw = fresh()
    torch.manual_seed(draw.randrange(2**31))
    logits, history = torch.randn(9, V), torch.randint(0, 9, (9, 30))
    prompt, position = torch.randint(1, 15, (9,)), torch.randint(15, 30, (9,))
    penalties = torch.rand(9, 3) + 0.5
    out = penalise(logits, history, prompt, position, penalties)
    for row in range(9):
        seen = history[row, : position[row]].tolist()
        new = sequence(
            int(prompt[row]), repetition_penalty=penalties[row, 0].item(),
            frequency_penalty=penalties[row, 1].item(), presence_penalty=penalties[row, 2].item(),
        )
        assert np.array_equal(out[row].numpy(), naive(new, logits[row].numpy(), seen))


def test_plain_parameters_have_no_rules() -> None:
    assert LogitRules.of(sequence(3, stop_ids=(1,), temperature=0.3, top_k=5, min_p=0.1)) is None
    assert LogitRules.of(sequence(3, min_tokens=5)) is None, "nothing stops it anyway"


def test_stop_ids_are_banned_by_position_and_bad_words_for_good() -> None:
    rules = LogitRules.of(sequence(10, stop_ids=(7, 3), bad_words=((9,),), min_tokens=4))
    assert rules is not None
    assert rules.token_ids.tolist() == [3, 7, 9]
    assert rules.banned_until.tolist() == [14, 14, ALWAYS]


def move(draw: random.Random, rows: list[NewSequence | None]) -> None:
    """Change a batch in one of the ways in which rows come, go and change places."""
    taken = [row for row, new in enumerate(rows) if new is not None]
    operation = draw.choice(("add", "add", "remove", "swap", "compact"))
    if operation == "add" and None in rows:
        rows[rows.index(None)] = random_sequence(draw, draw.randrange(1, 9))
    elif operation == "remove" and taken:
        rows[draw.choice(taken)] = None
    elif operation == "swap":
        first, second = draw.sample(range(len(rows)), 2)
        rows[first], rows[second] = rows[second], rows[first]
    elif operation == "compact":
        rows.sort(key=lambda new: new is None)


def rules_on_the_device(
    device: dict[str, np.ndarray], shape: RulesShape
) -> dict[int, tuple[Any, ...]]:
    """By sample position: entries, penalties, where its output begins, allow list, bad words."""
    found = {}
    for place, sample in enumerate(device["sample"][: shape.num_samples].tolist()):
        of_row = device["entry"][: shape.num_entries] // V == place
        words = device["word_sample"][: shape.num_words] == place
        count = shape.num_words * shape.word_width
        prefix = device["word_prefix"][:count].reshape(shape.num_words, shape.word_width)[words]
        found[sample] = (
            (device["entry"][: shape.num_entries][of_row] % V).tolist(),
            device["entry_bias"][: shape.num_entries][of_row].tolist(),
            device["entry_until"][: shape.num_entries][of_row].tolist(),
            device["penalties"][3 * place : 3 * place + 3].tolist(),
            device["num_prompt"][place],
            device["is_allow_list"][place],
            [
                (*(t for t in before[::-1] if t >= 0), last)
                for before, last in zip(
                    prefix.tolist(), device["word_last"][: shape.num_words][words].tolist(),
                    strict=True,
                )
            ],
        )
    return found


def test_b62_rules_follow_their_rows_through_a_thousand_moves() -> None:
    """Scenario B62: rows swap, compact, leave and come back; each keeps its own parameters."""
    draw = fresh()
    runtime = rt.Runtime.create("cpu")
    stage = RulesStage(runtime, depth=2, max_samples=48, vocab_size=V)
    rows: list[NewSequence | None] = [None] * 8
    for step in range(1000):
        move(draw, rows)
        samples = 1 + step % 3
        ruled, expected = [], {}
        for row, new in enumerate(rows):
            rules = None if new is None else LogitRules.of(new)
            if rules is None:
                continue
            ruled.append(
                RuledRow(rules=rules, first_sample=5 * row, num_samples=samples, table_start=row,
                         table_width=1)
            )
            penalties = (
                rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
            )
            for sample in range(5 * row, 5 * row + samples):
                expected[sample] = (
                    rules.token_ids.tolist(), rules.biases.tolist(), rules.banned_until.tolist(),
                    np.array(penalties, dtype=np.float32).tolist(),
                    rules.num_prompt_tokens, rules.is_allow_list,
                    list(rules.bad_words),
                )
        if ruled:
            staged, shape = stage.stage(ruled, runtime.stream("compute"))
            device = {name: runtime.read(buffer).numpy() for name, buffer in staged.items()}
            assert rules_on_the_device(device, shape) == expected


def test_the_stage_grows_with_its_rows() -> None:
    runtime = rt.Runtime.create("cpu")
    stage = RulesStage(runtime, depth=1, max_samples=16, vocab_size=V)
    for size in (2, 39, 3):
        rules = LogitRules.of(sequence(1, allowed_token_ids=list(range(size))))
        assert rules is not None
        row = RuledRow(rules=rules, first_sample=0, num_samples=4, table_start=0, table_width=1)
        staged, shape = stage.stage([row], runtime.stream("compute"))
        assert shape.num_entries == 4 * size
        entries = runtime.read(staged["entry"])[: 4 * size]
        assert entries.tolist() == [v * V + t for v in range(4) for t in range(size)]
