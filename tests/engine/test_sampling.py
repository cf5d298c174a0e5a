"""Every sampling parameter at every drafted position: the tokens are those of the plain loop.

The loop runs one sequence alone through models.reference_loop and processes logits with numpy,
written from the parameters' meaning; nothing of the worker is in it.
"""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import torch
from plain_sampling import GOLDEN, MASK_64, ascii_tokenizer, choose

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.load import load_parts
from headrace.errors import RequestError
from headrace.models.reference_loop import build_caches, prompt_batch, run_reference
from headrace.sampling_params import SamplingParams
from headrace.server.logprobs import CompletionLogprobs, chat_logprobs
from headrace.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.models.qwen3_5 import Qwen35Model
    from headrace.outputs import RequestOutput, TokenLogprob
    from headrace.text import Tokenizer

V = 160
NEW_TOKENS = 20
LETTERS = tuple(range(65, 91))


def fresh() -> random.Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    seed = secrets.randbits(31)
    print(f"weights of seed {seed}")
    return tiny_model(seed=seed, vocab_size=V)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ascii_tokenizer(V)


# The loop that the engine is compared with -------------------------------------------------------


def process(
    params: SamplingParams,
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    runs: Sequence[Sequence[int]],
    stops: Sequence[int],
) -> np.ndarray:
    out = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        out[token] += np.float32(bias)
    for token in {*prompt, *output}:
        rate = np.float32(params.repetition_penalty)
        out[token] = out[token] / rate if out[token] > 0 else out[token] * rate
    for token in set(output):
        out[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        out[token] -= np.float32(params.presence_penalty)
    if params.allowed_token_ids is not None:
        out[[t for t in range(V) if t not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        out[list(stops)] = -np.inf
    for word in runs:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
            out[word[-1]] = -np.inf
    return out


class Case:
    """A request and the tokens that it must get."""

    def __init__(
        self,
        model: Qwen35Model,
        prompt: list[int],
        runs: Sequence[Sequence[int]] = (),
        **params: Any,  # noqa: ANN401
    ) -> None:
        self.prompt = prompt
        values: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "seed": 11}
        self.params = SamplingParams(**(values | params))
        stops = [*self.params.stop_token_ids, *([] if self.params.ignore_eos else [1])]
        output: list[int] = []

        def pick(logits: torch.Tensor, position: int) -> int:
            if output and output[-1] in stops and len(output) >= self.params.min_tokens:
                return output[-1]
            processed = process(self.params, logits.numpy(), prompt, output, runs, stops)
            output.append(choose(self.params, processed, position))
            return output[-1]

        with np.errstate(divide="ignore"):
            run = run_reference(model, prompt, self.params.max_tokens or 1, choose=pick)
        self.tokens = output
        self.logits = run.logits[: len(output)].numpy()


def engine(
    model: Qwen35Model, tokenizer: Tokenizer | None = None, **changes: Any  # noqa: ANN401
) -> Engine:
    values: dict[str, Any] = {
        "model": "tiny", "max_num_seqs": 8, "max_model_len": 200, "max_num_batched_tokens": 128,
        "check_invariants": True, "speculative": "none",
    }
    config = EngineConfig(**(values | changes))
    parts = load_parts(config, model=model)
    return Engine(config, parts=dataclasses.replace(parts, tokenizer=tokenizer))


def script(target: Engine, cases: Sequence[Case], draw: random.Random, first_id: int = 1) -> None:
    """Let the scripted drafter propose each case's own tokens, right for 0..k or no draft."""
    if target.worker.drafter != "scripted":
        return
    k = target.parts.sizes.max_drafts
    for seq_id, case in enumerate(cases, start=first_id):
        truth = np.array(case.prompt + case.tokens, dtype=np.int64)
        keep = [draw.choice([-1, *range(k + 1), k, k]) for _ in range(len(truth) + k + 1)]
        target.worker.scripts[seq_id] = (truth, np.array(keep, dtype=np.int64))


def generate(target: Engine, cases: Sequence[Case]) -> list[RequestOutput]:
    return LLM(engine=target).generate(
        [case.prompt for case in cases], [case.params for case in cases]
    )


def assert_same(target: Engine, cases: Sequence[Case], outputs: Sequence[RequestOutput]) -> None:
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids == case.tokens, case.params
    target.scheduler.check()
    assert not target.scheduler.running
    assert not target.scheduler.waiting


def words(draw: random.Random, count: int, among: Sequence[int] = range(2, V)) -> list[int]:
    return draw.choices(among, k=count)


@pytest.fixture(scope="module")
def cases(model: Qwen35Model) -> list[Case]:
    """Requests of every kind, short and longer than a scan chunk, greedy and seeded."""
    draw = fresh()
    few = tuple(draw.sample(range(2, V), 3))
    plain = Case(model, words(draw, 9))
    common = max(set(plain.tokens), key=plain.tokens.count)
    made: list[Case] = [plain]

    def add(length: int, **params: Any) -> None:  # noqa: ANN401
        made.append(Case(model, words(draw, length), **params))

    add(3, frequency_penalty=1.5, allowed_token_ids=few)
    add(70, presence_penalty=2.0)
    add(30, repetition_penalty=1.7, presence_penalty=-0.5)
    add(12, repetition_penalty=0.6, frequency_penalty=-2.0, temperature=0.7, seed=2**64 - 1)
    made.append(Case(model, plain.prompt, logit_bias={common: -100.0, few[0]: 0.5}))
    add(65, logit_bias={few[1]: 100.0}, temperature=1.0, seed=-5)
    add(20, allowed_token_ids=few, temperature=1.3, seed=3, top_k=2)
    add(8, min_tokens=7, stop_token_ids=few, allowed_token_ids=(*few, 90, 91), temperature=1.0)
    add(129, min_p=0.4, temperature=1.0, repetition_penalty=1.2)
    add(17, top_p=0.7, temperature=1.2, frequency_penalty=0.8, ignore_eos=True)
    add(5, top_k=20, temperature=1.0, seed=0, presence_penalty=1.0, logit_bias={few[2]: 3.25})
    return made


SETTINGS = [
    # speculative, layout, asynchronous, scheme, little memory
    ("none", "slots", True, "columns", False),
    ("none", "compact", False, "columns", True),
    ("scripted:3", "slots", True, "columns", True),
    ("scripted:3", "compact", True, "columns", False),
    ("scripted:3", "slots", False, "replay", False),
    ("scripted:5", "compact", False, "columns", False),
    ("ngram:3", "slots", True, "columns", False),
    ("ngram:3", "compact", True, "columns", True),
    ("mtp:2", "slots", True, "columns", True),
    ("mtp:2", "compact", True, "replay", False),
]


@pytest.mark.thinned
@pytest.mark.matrix
@pytest.mark.parametrize(("speculative", "layout", "is_async", "scheme", "is_tight"), SETTINGS)
def test_all_parameters_give_the_loops_tokens(
    model: Qwen35Model, cases: list[Case], speculative: str, layout: str, is_async: bool,  # noqa: FBT001
    scheme: str, is_tight: bool,  # noqa: FBT001
) -> None:
    draw = fresh()
    memory: dict[str, Any] = {}
    if is_tight:
        memory = {"num_kv_blocks": 18, "num_state_blocks": 16}
    target = engine(
        model, speculative=speculative, batch_layout=layout, async_scheduling=is_async,
        state_scheme=scheme, max_num_seqs=5 if is_tight else 8, **memory,
    )
    for _ in range(2):  # The second time prompts come from the prefix cache.
        shuffled = draw.sample(cases, len(cases))
        script(target, shuffled, draw, first_id=target._next_seq_id)
        assert_same(target, shuffled, generate(target, shuffled))
    if speculative.startswith("scripted"):
        assert target.num_accepted_drafts > 50


@pytest.mark.thinned
@pytest.mark.scenarios
@pytest.mark.parametrize("layout", ["slots", "compact"])
@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 0.4}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.9},
     {"min_tokens": 6, "stop_token_ids": LETTERS[:2]}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_b91_penalties_count_each_token_of_an_accepted_run(
    model: Qwen35Model, penalty: dict[str, Any], layout: str
) -> None:
    """Scenario B91: drafts right for 1..K tokens; the counts flip the argmax inside a run."""
    draw = fresh()
    common: dict[str, Any] = {
        "allowed_token_ids": LETTERS[:9], "max_tokens": 24, "ignore_eos": True,
    }
    case = plain = Case(model, words(draw, 10), **common)
    while case.tokens == plain.tokens:  # Until the penalty matters.
        plain = Case(model, words(draw, 10), **common)
        case = Case(model, plain.prompt, **common, **penalty)
    for right in range(1, 6):
        target = engine(model, speculative="scripted:5", batch_layout=layout)
        truth = np.array(case.prompt + case.tokens, dtype=np.int64)
        target.worker.scripts[1] = (truth, np.full(len(truth) + 6, right, dtype=np.int64))
        assert_same(target, [case], generate(target, [case]))
        steps_at_best = math.ceil((len(case.tokens) - 1) / (right + 1)) + 2
        assert target.stats()["steps"] <= steps_at_best + 2, "drafts were rejected"


@pytest.mark.thinned
@pytest.mark.scenarios
@pytest.mark.parametrize("speculative", ["none", "scripted:3", "mtp:2"])
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b92_no_placeholder_enters_penalties_or_bad_words(
    model: Qwen35Model, tokenizer: Tokenizer, speculative: str, layout: str
) -> None:
    """Scenario B92: they join plain requests that run; the first half is still in flight."""
    draw = fresh()
    letters: dict[str, Any] = {"allowed_token_ids": LETTERS}
    plain = [Case(model, words(draw, n), max_tokens=40, ignore_eos=True) for n in (4, 11, 18)]
    prompt = words(draw, 7)
    free = Case(model, prompt, **letters)
    banned = [tokenizer.decode(free.tokens[at : at + 2]) for at in (0, 5, 9)]
    runs = [free.tokens[at : at + 2] for at in (0, 5, 9)]
    joining = [
        Case(model, words(draw, 6), repetition_penalty=1.8, frequency_penalty=0.5),
        Case(model, prompt, runs, bad_words=banned, **letters),
    ]
    assert joining[1].tokens != free.tokens
    target = engine(model, tokenizer, speculative=speculative, batch_layout=layout)
    everything = [*plain, *joining]
    script(target, everything, draw)
    done: dict[str, RequestOutput] = {}
    for index, case in enumerate(everything):
        if index == len(plain):
            for _ in range(4):
                done |= {output.request_id: output for output in target.step()}
        target.add_request(str(index), case.prompt, case.params)
    while target.has_work():
        done |= {output.request_id: output for output in target.step()}
    assert_same(target, everything, [done[str(index)] for index in range(len(everything))])


@pytest.mark.thinned
@pytest.mark.scenarios
@pytest.mark.parametrize("speculative", ["none", "scripted:3", "ngram:3"])
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b94_a_seed_gives_the_same_tokens_in_any_company(
    model: Qwen35Model, speculative: str, layout: str
) -> None:
    """Scenario B94: alone, with neighbours that come and leave, without drafts, preempted."""
    draw = fresh()
    case = Case(model, words(draw, 21), temperature=1.0, seed=1234, repetition_penalty=1.1)
    assert len(set(case.tokens)) > 3
    target = engine(model, speculative=speculative, batch_layout=layout)
    for neighbours in (0, 1, 3, 7, "preempted", "preempted twelve times"):
        preemptions = {"preempted": 1, "preempted twelve times": 12}.get(str(neighbours), 0)
        script(target, [case], draw, first_id=target._next_seq_id)
        request = target.add_request("mine", case.prompt, case.params)
        for index in range(3 if isinstance(neighbours, str) else neighbours):
            leaves = SamplingParams(temperature=1.0, max_tokens=2 + 3 * index)
            target.add_request(f"other {index}", words(draw, 1 + 9 * index), leaves)
        last = None
        while target.has_work():
            for output in target.step():
                last = output if output.request_id == "mine" else last
            mine = request.sequences[0]
            if preemptions and mine in target.scheduler.running and mine.num_output_tokens:
                preemptions -= 1
                target.scheduler.preempt(mine)
        assert last is not None
        assert last.outputs[0].token_ids == case.tokens, neighbours
        assert not preemptions


@pytest.mark.thinned
@pytest.mark.scenarios
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b97_biases_and_masks_reach_every_position_of_a_run(
    model: Qwen35Model, temperature: float, layout: str
) -> None:
    """Scenario B97: what the drafter proposes is biased away, one token up, three allowed."""
    draw = fresh()
    prompt = words(draw, 14)
    free = Case(model, prompt, temperature=temperature)
    unwanted = set(free.tokens)
    liked = draw.choice([token for token in range(2, V) if token not in unwanted])
    common: dict[str, Any] = {"temperature": temperature, "ignore_eos": True}
    wanted = [
        Case(model, prompt, logit_bias=dict.fromkeys(unwanted, -100.0), **common),
        Case(model, prompt, logit_bias={liked: 100.0}, **common),
        Case(model, prompt, allowed_token_ids=sorted(unwanted | {2, 3, 4})[:3], **common),
        Case(model, prompt, min_p=0.3, **common),
    ]
    target = engine(model, speculative="scripted:4", batch_layout=layout)
    for script_of in (wanted, [free] * 4):  # All drafts right, then all those of the free run.
        for seq_id, case in enumerate(script_of, start=target._next_seq_id):
            truth = np.array(prompt + case.tokens, dtype=np.int64)
            target.worker.scripts[seq_id] = (truth, np.full(len(truth) + 5, 4, dtype=np.int64))
        outputs = generate(target, wanted)
        assert_same(target, wanted, outputs)
        assert not unwanted & set(outputs[0].outputs[0].token_ids)
        assert set(outputs[1].outputs[0].token_ids) == {liked}


@pytest.mark.scenarios
@pytest.mark.parametrize("speculative", ["none", "ngram:3"])
def test_b104_each_completion_is_a_request_of_a_derived_seed(
    model: Qwen35Model, speculative: str
) -> None:
    """Scenario B104: n = 4 of seed 7, one stops at its first token; aborted after an output."""
    draw = fresh()
    prompt = words(draw, 30)
    seeds = [(7 + index * GOLDEN) & MASK_64 for index in range(4)]
    common: dict[str, Any] = {"temperature": 1.0, "presence_penalty": 0.5}
    first = [Case(model, prompt, seed=seed, **common).tokens[0] for seed in seeds]
    assert len(set(first)) > 1, "completions of one seed are equal"
    stops = (first[2],)
    children = [Case(model, prompt, seed=s, stop_token_ids=stops, **common) for s in seeds]
    target = engine(model, speculative=speculative)
    params = SamplingParams(
        n=4, seed=7, max_tokens=NEW_TOKENS, stop_token_ids=stops, **common
    )
    output = LLM(engine=target).generate([prompt], params)[0]
    assert [child.index for child in output.outputs] == [0, 1, 2, 3]
    assert [child.token_ids for child in output.outputs] == [case.tokens for case in children]
    assert output.outputs[2].finish_reason == "stop"
    assert output.outputs[2].stop_reason == first[2]
    target.add_request("aborted", prompt, params)
    while not target.step():
        pass
    target.abort("aborted")
    while target.has_work():
        target.step()
    target.scheduler.check()
    stats = target.stats()
    for pool in (stats["kv_blocks"], *stats["state_blocks"]):
        assert pool["free"] + pool["cached"] == pool["total"]


@pytest.mark.scenarios
@pytest.mark.parametrize("speculative", ["none", "mtp:2"])
def test_b116_masks_do_not_make_logprobs_infinite(
    model: Qwen35Model, tokenizer: Tokenizer, speculative: str
) -> None:
    """Scenario B116: two allowed tokens with five log-probabilities; top_k 1 with the prompt's."""
    draw = fresh()
    prompt = words(draw, 12)
    common: dict[str, Any] = {"max_tokens": 6, "logprobs": 5, "seed": 1, "ignore_eos": True}
    requests = [
        SamplingParams(allowed_token_ids=(70, 80), **common),
        SamplingParams(top_k=1, prompt_logprobs=2, **common),
        SamplingParams(logit_bias=dict.fromkeys(range(80), -100.0), **common),
    ]
    target = engine(model, tokenizer, speculative=speculative)
    for params, output in zip(
        requests, LLM(engine=target).generate([prompt] * 3, requests), strict=True
    ):
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert all(math.isfinite(e.logprob) for entry in entries for e in entry.values())
        ids = output.outputs[0].token_ids
        for token, entry in zip(ids, entries, strict=True):
            assert {5, 6} >= {len(entry)}
            assert entry[token].logprob <= max(e.logprob for e in entry.values())
        json = orjson.dumps(
            [
                chat_logprobs(ids, entries, top=5, tokenizer=tokenizer),
                CompletionLogprobs(top=5, tokenizer=tokenizer).of(
                    prompt, output.prompt_logprobs or []
                ),
            ]
        )
        assert b"null" not in json.replace(b'"refusal":null', b"") or params.prompt_logprobs


@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b62_parameters_follow_rows_that_are_moved(model: Qwen35Model, layout: str) -> None:
    """Scenario B62: requests of every kind come and go in random order; each stays itself."""
    draw = fresh()
    kinds: list[dict[str, Any]] = [
        {}, {"allowed_token_ids": LETTERS[:3]}, {"frequency_penalty": 1.0}, {},
        {"logit_bias": {5: 100.0}}, {"temperature": 1.0, "seed": 4}, {"repetition_penalty": 1.5},
        {"min_tokens": 9, "stop_token_ids": tuple(range(2, 140))},
    ]
    waiting = [
        Case(model, words(draw, draw.randrange(1, 20)), max_tokens=draw.randrange(1, 12), **{
            name: min(value, 1) if name == "min_tokens" else value
            for name, value in kinds[index % len(kinds)].items()
        })
        for index in range(24)
    ]
    target = engine(model, batch_layout=layout, max_num_seqs=6, speculative="ngram:2")
    done: dict[str, RequestOutput] = {}
    added = aborted = 0
    while added < len(waiting) or target.has_work():
        if added < len(waiting) and draw.random() < 0.5:
            case = waiting[added]
            target.add_request(str(added), case.prompt, case.params)
            added += 1
            if draw.random() < 0.3:  # One that is not there to the end.
                target.add_request(f"gone {added}", case.prompt, SamplingParams(
                    max_tokens=30, allowed_token_ids=(9,)))
        if draw.random() < 0.1:
            for index in range(added + 1):
                aborted += target.abort(f"gone {index}") is not None
        if draw.random() < 0.1 and target.scheduler.running:
            target.scheduler.preempt(target.scheduler.running[-1])
        done |= {output.request_id: output for output in target.step()}
        if added == len(waiting):
            for index in range(added + 1):
                target.abort(f"gone {index}")
    assert_same(target, waiting, [done[str(index)] for index in range(len(waiting))])


@pytest.mark.sim
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_the_simulated_device_reports_nothing(
    model: Qwen35Model, cases: list[Case], layout: str
) -> None:
    draw = fresh()
    some = draw.sample(cases, 6)
    target = engine(
        model, speculative="mtp:2", batch_layout=layout, rt_backend="sim",
        seed=draw.randrange(2**31), max_num_seqs=4,
    )
    runtime = target.parts.runtime
    assert_same(target, some, generate(target, some))
    scored = SamplingParams(prompt_logprobs=2, max_tokens=3)
    LLM(engine=target).generate([case.prompt for case in some], scored)
    assert runtime.finish() == ()


# Parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", ["none", "scripted:3", "mtp:2"])
def test_history_reaches_into_a_cached_prefix(model: Qwen35Model, speculative: str) -> None:
    draw = fresh()
    start = words(draw, 130, LETTERS)
    first = Case(model, [*start, 50], max_tokens=4)
    second = Case(
        model, [*start, 51, 52], repetition_penalty=2.0, logit_bias=dict.fromkeys(LETTERS, 0.4)
    )
    plain = Case(model, second.prompt, logit_bias=dict.fromkeys(LETTERS, 0.4))
    assert second.tokens != plain.tokens
    target = engine(model, speculative=speculative)
    generate(target, [first])
    script(target, [second], draw, first_id=target._next_seq_id)
    outputs = generate(target, [second])
    assert outputs[0].num_cached_tokens == 128
    assert_same(target, [second], outputs)


@pytest.mark.parametrize(
    "share",
    [{"temperature": 1e-45}, {"temperature": 1e-12}, {"top_p": 5e-324}],
    ids=str,
)
def test_values_that_float32_cannot_hold_leave_the_likeliest_token(
    model: Qwen35Model, share: dict[str, float]
) -> None:
    prompt = words(fresh(), 12)
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "seed": 3}
    chosen, likeliest = LLM(engine=engine(model)).generate([prompt] * 2, [
        SamplingParams(**(common | {"temperature": 1.0} | share)),
        SamplingParams(**common, temperature=0.0),
    ])
    assert chosen.outputs[0].token_ids == likeliest.outputs[0].token_ids


@pytest.mark.parametrize(
    "speculative", [pytest.param("none", marks=pytest.mark.full), "scripted:3"]
)
def test_bad_words_are_banned_with_and_without_a_space_before(
    model: Qwen35Model, tokenizer: Tokenizer, speculative: str
) -> None:
    draw = fresh()
    allowed = (*LETTERS[:2], 32)
    prompt = words(draw, 9, LETTERS)
    for word in ("A", "AB", " BA", "A B"):
        bare = [ord(character) for character in word.lstrip()]
        case = Case(
            model, prompt, [bare], bad_words=[word], allowed_token_ids=allowed, temperature=2.0,
            max_tokens=40,
        )
        target = engine(model, tokenizer, speculative=speculative)
        script(target, [case], draw)
        outputs = generate(target, [case])
        text = tokenizer.decode(outputs[0].outputs[0].token_ids)
        assert_same(target, [case], outputs)
        assert word not in text
        assert word.lstrip() not in text


@pytest.mark.parametrize("speculative", ["none", "scripted:4", "ngram:3"])
def test_min_tokens_keeps_stops_away_inside_runs(model: Qwen35Model, speculative: str) -> None:
    draw = fresh()
    for min_tokens in (0, 1, 2, 7):
        case = Case(
            model, words(draw, 5), min_tokens=min_tokens, stop_token_ids=LETTERS[:5],
            allowed_token_ids=LETTERS[:7], temperature=1.0, seed=min_tokens,
        )
        target = engine(model, speculative=speculative)
        truth = np.array(case.prompt + case.tokens, dtype=np.int64)
        target.worker.scripts[1] = (truth, np.full(len(truth) + 5, 4, dtype=np.int64))
        outputs = generate(target, [case])
        assert_same(target, [case], outputs)
        assert len(outputs[0].outputs[0].token_ids) > min_tokens
        assert not set(outputs[0].outputs[0].token_ids[:min_tokens]) & set(LETTERS[:5])


# Log-probabilities of the prompt ------------------------------------------------------------------


def values_of(
    entries: Sequence[dict[int, TokenLogprob] | None],
) -> list[dict[int, tuple[float, int]] | None]:
    return [
        None if entry is None else {t: (e.logprob, e.rank) for t, e in entry.items()}
        for entry in entries
    ]


@pytest.mark.thinned
@pytest.mark.scenarios
@pytest.mark.parametrize(
    ("speculative", "layout", "is_async"),
    [("none", "slots", True), ("mtp:2", "slots", True), ("mtp:2", "compact", False),
     ("ngram:3", "compact", True)],
)
def test_b99_prompt_logprobs_are_those_of_the_whole_prompt(
    model: Qwen35Model, speculative: str, layout: str, is_async: bool  # noqa: FBT001
) -> None:
    """Scenario B99: lengths about the chunk, sent twice; a cached prefix is not used for them."""
    draw = fresh()
    chunk = 64
    prompts = [words(draw, n) for n in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk)]
    target = engine(
        model, speculative=speculative, batch_layout=layout, async_scheduling=is_async,
        max_num_batched_tokens=chunk, max_num_seqs=3,
    )
    wanted: list[list[dict[int, tuple[Any, int]] | None]] = []
    for prompt in prompts:
        caches = build_caches(model, max_tokens=len(prompt), state_blocks=2)
        hidden = model.forward(prompt_batch(model, prompt, 0, len(prompt)), caches)
        logits = model.logits(hidden[: len(prompt)])
        lines: list[dict[int, tuple[Any, int]] | None] = [None]
        for position, token in enumerate(prompt[1:]):
            row = logits[position]
            line = {int(t): rank + 1 for rank, t in enumerate(row.topk(3).indices)}
            line[token] = int((row > row[token]).sum()) + 1
            exact = row.double().log_softmax(-1)
            # Differences of float32 numbers about 10.
            near = {t: pytest.approx(float(exact[t]), abs=2e-6) for t in line}
            lines.append({t: (near[t], rank) for t, rank in line.items()})
        wanted.append(lines)
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=3, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = LLM(engine=target)
    tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
    for _ in range(2):
        for prompt, output, lines, ids in zip(
            prompts, llm.generate(prompts, params), wanted, tokens, strict=True
        ):
            assert output.num_cached_tokens == 0
            assert sum(output.missed_tokens.values()) == len(prompt)
            assert set(output.missed_tokens) <= {"prompt_logprobs", "last_token"}
            assert output.prompt_logprobs is not None
            assert values_of(output.prompt_logprobs) == lines
            assert output.outputs[0].token_ids == ids
    target.scheduler.check()


def test_prompt_logprobs_survive_a_preemption(model: Qwen35Model) -> None:
    draw = fresh()
    prompt = words(draw, 150)
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=-1, ignore_eos=True)
    target = engine(model, max_num_batched_tokens=64, speculative="mtp:1")
    alone = LLM(engine=target).generate([prompt], params)[0]
    assert alone.prompt_logprobs is not None
    assert [len(entry or ()) for entry in alone.prompt_logprobs] == [0] + [V] * 149
    request = target.add_request("again", prompt, params)
    last, num_steps = None, 0
    while target.has_work():
        for output in target.step():
            last = output
        num_steps += 1
        seq = request.sequences[0]
        if num_steps in (2, 7, 13) and seq in target.scheduler.running:
            target.scheduler.preempt(seq)
    assert request.sequences[0].num_preemptions > 1
    assert last is not None
    assert last.prompt_logprobs is not None
    assert values_of(last.prompt_logprobs) == values_of(alone.prompt_logprobs)
    assert last.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("speculative", ["none", "scripted:3", "mtp:2"])
def test_logprobs_are_raw_whatever_is_done_to_the_logits(
    model: Qwen35Model, speculative: str
) -> None:
    draw = fresh()
    case = Case(
        model, words(draw, 8), logprobs=4, temperature=1.5, frequency_penalty=1.0,
        logit_bias={7: 2.0}, allowed_token_ids=(7, 8, 9, 10),
    )
    target = engine(model, speculative=speculative)
    script(target, [case], draw)
    outputs = generate(target, [case])
    assert_same(target, [case], outputs)
    entries = outputs[0].outputs[0].logprobs
    assert entries is not None
    for token, row, entry in zip(case.tokens, case.logits, entries, strict=True):
        exact = torch.from_numpy(row).double().log_softmax(-1)
        assert entry[token].logprob == pytest.approx(float(exact[token]), abs=2e-6)
        assert set(exact.topk(4).indices.tolist()) <= set(entry)


# Refusals ----------------------------------------------------------------------------------------


def refusal(build: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        build()
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("logit_bias", {3: 101.0}, "101"), ("logit_bias", {3: math.nan}, "nan"),
        ("logit_bias", {-1: 1.0}, "-1"), ("logit_bias", {"3": 1.0}, "'3'"),
        ("logit_bias", [3], "[3]"), ("logit_bias", {V: 1.0}, str(V)),
        ("allowed_token_ids", (), "empty"), ("allowed_token_ids", (-2,), "-2"),
        ("allowed_token_ids", (5, V), str(V)), ("allowed_token_ids", (True,), "True"),
        ("bad_words", ("",), "''"), ("bad_words", (7,), "7"),
        ("presence_penalty", 2.5, "2.5"), ("frequency_penalty", math.inf, "inf"),
        ("repetition_penalty", 0.0, "0.0"), ("prompt_logprobs", 21, "21"),
        ("prompt_logprobs", True, "True"), ("min_tokens", -1, "-1"),
        ("stop_token_ids", (V,), str(V)),
    ],
)
def test_wrong_values_are_refused_by_name(
    model: Qwen35Model, tokenizer: Tokenizer, name: str, value: object, said: str
) -> None:
    target = engine(model, tokenizer)
    error = refusal(
        lambda: target.add_request("x", [1, 2], SamplingParams(**{name: value}))  # type: ignore[arg-type]
    )
    assert error.param == name
    assert said in str(error)
    assert not target.has_work()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": (65,), "bad_words": ("A",)}, "allowed_token_ids"),
        ({"allowed_token_ids": (65, 66), "bad_words": ("A", "CB")}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 9), "stop_token_ids": (9,), "min_tokens": 2},
         "allowed_token_ids"),
        ({"stop_token_ids": tuple(range(V)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_masks_that_could_leave_nothing_are_refused(
    model: Qwen35Model, tokenizer: Tokenizer, params: dict[str, Any], name: str
) -> None:
    target = engine(model, tokenizer)
    error = refusal(lambda: target.add_request("x", [1, 2], SamplingParams(**params)))
    assert error.param == name
    assert "no token" in str(error)


def test_bad_words_without_a_tokenizer_are_refused(model: Qwen35Model) -> None:
    target = engine(model)
    error = refusal(lambda: target.add_request("x", [1], SamplingParams(bad_words=("no",))))
    assert error.param == "bad_words"


def test_all_logprobs_of_a_long_prompt_are_refused(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.engine.MAX_PROMPT_LOGITS", 10 * V)
    target = engine(model)
    error = refusal(lambda: target.add_request("x", [5] * 11, SamplingParams(prompt_logprobs=-1)))
    assert error.param == "prompt_logprobs"
    target.add_request("y", [5] * 10, SamplingParams(prompt_logprobs=-1))
