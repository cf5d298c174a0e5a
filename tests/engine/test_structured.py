"""Structured output: always valid, and the tokens of the plain loop under any drafts and layouts.

The loop follows a grammar with a matcher of its own, one confirmed token after another: nothing is
ever rolled back in it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import secrets
import threading
from typing import TYPE_CHECKING, Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from plain_sampling import ascii_tokenizer, choose

from headrace.config import EngineConfig
from headrace.engine import async_llm
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.load import load_parts
from headrace.errors import RequestError
from headrace.grammar import compiler, fill_masks
from headrace.models.reference_loop import run_reference
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import BLANKS, FreeBeginning, StructuredOutputsParams
from headrace.testing import tiny_model
from headrace.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from headrace.models.qwen3_5 import Qwen35Model

V = 280
EOS = 1
OPEN, CLOSE = 2, 3
"""Tokens that stand for the marks of reasoning."""
NEW_TOKENS = 32


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
    return ascii_tokenizer(V, num_reserved=4)


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> Any:  # noqa: ANN401
    """The vocabulary as the library reads it, without the engine's bytes.

    It reads as many ids as there are tokens, and would forbid those at the end: ids without a token
    get one.
    """
    state = json.loads(tokenizer.to_json())
    vocab = state["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in sorted(set(range(max(vocab.values()))) - set(vocab.values())):
        vocab[f"<|{token}|>"] = token
        state["added_tokens"].append(
            {"id": token, "content": f"<|{token}|>", "special": True, **flags}
        )
    return llguidance.LLTokenizer(json.dumps(state), n_vocab=V, eos_token=[EOS])


def random_schema(  # noqa: PLR0911 - one kind of schema each
    draw: random.Random, depth: int = 2
) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "pattern"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": draw.randrange(1, 6)}
        case "pattern":
            return {"type": "string", "pattern": f"^[a-c]{{1,{draw.randrange(2, 5)}}}X$"}
        case "integer":
            low = draw.randrange(-30, 30)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(0, 300)}
        case "enum":
            return {"enum": draw.sample(["red", "Rot", 7, None, True, "a b"], k=2)}
        case "object":
            names = draw.sample(["a", "b", "name", "x y"], k=draw.randrange(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": [name for name in names if draw.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            most = draw.randrange(0, 3)
            return {
                "type": "array", "items": random_schema(draw, depth - 1),
                "minItems": draw.randrange(0, most + 1), "maxItems": most,
            }
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


class Follower:
    """The masks of one output, from confirmed tokens alone."""

    def __init__(self, library: Any, wanted: StructuredOutputsParams) -> None:  # noqa: ANN401
        make = llguidance.LLMatcher
        match wanted.kind:
            case "json":
                options: Any = {"whitespace_pattern": BLANKS}
                if wanted.disable_any_whitespace:
                    options = {"whitespace_flexible": False}
                grammar = make.grammar_from_json_schema(json.dumps(wanted.json), overrides=options)
            case "regex":
                grammar = make.grammar_from_regex(wanted.regex)
            case "choice":
                grammar = make.grammar_from_lark(
                    "start: " + " | ".join(json.dumps(text) for text in wanted.choice or ())
                )
            case _:
                grammar = make.grammar_from_lark(wanted.grammar)
        self.matcher = make(library, grammar)
        assert not self.matcher.is_error(), self.matcher.get_error()
        self.opens = wanted.beginning.opens if wanted.beginning else None
        self.closes = wanted.beginning.closes if wanted.beginning else None
        self.is_free = self.closes is not None and self.opens is None
        self.is_first = True

    def mask(self) -> np.ndarray:
        if self.is_free:
            allowed = np.ones(V, dtype=bool)
            allowed[EOS] = False
            return allowed
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:V].astype(bool)
        if self.is_first and self.opens is not None:
            allowed[self.opens] = True
        return allowed

    def push(self, token: int) -> bool:
        if self.is_free:
            self.is_free = token != self.closes
            return False
        if self.is_first and token == self.opens:
            self.is_free, self.is_first = True, False
            return False
        self.is_first = False
        assert self.matcher.consume_token(token)
        return bool(self.matcher.is_stopped())


class Case:
    """A request and the tokens that it must get."""

    def __init__(
        self, model: Qwen35Model, library: Any, prompt: list[int],  # noqa: ANN401
        wanted: StructuredOutputsParams | None, **params: Any,  # noqa: ANN401
    ) -> None:
        self.prompt, self.wanted = prompt, wanted
        values: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 1.5, "seed": 11}
        self.params = SamplingParams(**(values | params), structured_outputs=wanted)
        follower = Follower(library, wanted) if wanted else None
        output: list[int] = []
        done = False

        def pick(logits: torch.Tensor, position: int) -> int:
            nonlocal done
            if done:
                return 0
            values = logits.numpy().copy()
            for token, bias in (self.params.logit_bias or {}).items():
                values[token] += np.float32(bias)
            if follower is not None:
                values[~follower.mask()] = -np.inf
            token = choose(self.params, values, position)
            output.append(token)
            done = token == EOS or (follower is not None and follower.push(token))
            return token

        with np.errstate(divide="ignore"):
            run_reference(model, prompt, self.params.max_tokens or 1, choose=pick)
        self.tokens = output
        self.is_complete = done


def engine(model: Qwen35Model, tokenizer: Tokenizer, **changes: Any) -> Engine:  # noqa: ANN401
    values: dict[str, Any] = {
        "model": "tiny", "max_num_seqs": 8, "max_model_len": 200, "max_num_batched_tokens": 128,
        "check_invariants": True, "speculative": "none",
    }
    config = EngineConfig(**(values | changes))
    parts = load_parts(config, model=model)
    return Engine(config, parts=dataclasses.replace(parts, tokenizer=tokenizer))


def script(
    target: Engine, cases: Sequence[Case], draw: random.Random, keep: int | None = None
) -> None:
    """Let the scripted drafter propose each case's own tokens, right for 0..k or no draft."""
    if target.worker.drafter != "scripted":
        return
    k = target.parts.sizes.max_drafts
    for seq_id, case in enumerate(cases, start=target._next_seq_id):
        truth = np.array(case.prompt + case.tokens, dtype=np.int64)
        kept = [
            draw.choice([-1, *range(k + 1), k, k]) if keep is None else keep
            for _ in range(len(truth) + k + 1)
        ]
        target.worker.scripts[seq_id] = (truth, np.array(kept, dtype=np.int64))


def assert_the_loops_tokens(target: Engine, cases: Sequence[Case]) -> None:
    outputs = LLM(engine=target).generate(
        [case.prompt for case in cases], [case.params for case in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids == case.tokens, case.params
        assert output.outputs[0].finish_reason == ("stop" if case.is_complete else "length")
    target.scheduler.check()
    assert not target.scheduler.running


def prompt_of(draw: random.Random, length: int) -> list[int]:
    return draw.choices(range(4, V), k=length)


@pytest.fixture(scope="module")
def cases(model: Qwen35Model, library: Any) -> list[Case]:  # noqa: ANN401
    """Constrained and free requests, greedy and sampled, some with free text first."""
    draw = fresh()
    wanted = [
        StructuredOutputsParams(json=random_schema(draw), disable_any_whitespace=True),
        StructuredOutputsParams(json=random_schema(draw)),
        StructuredOutputsParams(regex="([a-f]{2} ){1,4}x+"),
        StructuredOutputsParams(choice=["red", "green", "greenish blue"]),
        StructuredOutputsParams(grammar='start: "(" start ")" | /[0-9]{1,3}/'),
        StructuredOutputsParams(
            json=random_schema(draw), beginning=FreeBeginning(closes=CLOSE)
        ),
        StructuredOutputsParams(
            regex="[xyz]{3,9}", beginning=FreeBeginning(opens=OPEN, closes=CLOSE)
        ),
    ]
    # A model without training hardly ever chooses the marks of free text.
    likely = {CLOSE: 4.0, OPEN: 6.0}
    made = [
        Case(
            model, library, prompt_of(draw, draw.choice([1, 9, 40, 64, 70])), form,
            seed=draw.randrange(2**40), temperature=draw.choice([0.0, 1.0, 2.5]),
            logit_bias=likely if form.beginning else None,
        )
        for form in wanted
    ]
    plain = [Case(model, library, prompt_of(draw, n), None, temperature=0.0) for n in (5, 66)]
    return made + plain


SETTINGS = [
    # speculative, layout, asynchronous, scheme, little memory
    ("none", "slots", True, "columns", True),
    ("scripted:3", "slots", True, "replay", False),
    ("scripted:5", "compact", True, "columns", False),
    ("ngram:3", "slots", True, "columns", True),
    ("mtp:2", "compact", True, "replay", False),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("speculative", "layout", "is_async", "scheme", "is_tight"), SETTINGS)
def test_speculation_gives_the_tokens_that_the_plain_loop_gives(
    model: Qwen35Model, tokenizer: Tokenizer, cases: list[Case], speculative: str, layout: str,
    is_async: bool, scheme: str, is_tight: bool,  # noqa: FBT001
) -> None:
    draw = fresh()
    memory: dict[str, Any] = {"num_kv_blocks": 18, "num_state_blocks": 16} if is_tight else {}
    target = engine(
        model, tokenizer, speculative=speculative, batch_layout=layout, async_scheduling=is_async,
        state_scheme=scheme, max_num_seqs=5 if is_tight else 8, **memory,
    )
    shuffled = draw.sample(cases, len(cases))
    script(target, shuffled, draw)
    assert_the_loops_tokens(target, shuffled)


def test_the_last_tokens_of_a_vocabulary_with_gaps_are_chosen(
    model: Qwen35Model, tokenizer: Tokenizer, library: Any  # noqa: ANN401
) -> None:
    """Ids are left out, so there are tokens with ids from the number of tokens on."""
    draw = fresh()
    lead = next(token for token in range(V) if tokenizer.token_bytes(token) == b"\xc6")
    last = [token for token in range(tokenizer.vocab_size, V) if tokenizer.token_bytes(token)]
    assert len(last) == 4
    cases = [
        Case(
            model, library, prompt_of(draw, 5),
            StructuredOutputsParams(json={"type": "string", "minLength": 2, "maxLength": 2}),
            temperature=0.0, logit_bias={lead: 100.0, token: 100.0},
        )
        for token in last
    ]
    assert_the_loops_tokens(engine(model, tokenizer), cases)
    for case, token in zip(cases, last, strict=True):
        assert case.tokens[1:5] == [lead, token] * 2


def test_a_vocabulary_that_the_library_would_cut_is_refused() -> None:
    """Where tokens have no fixed bytes, the library reads as many ids as there are tokens."""
    wanted = StructuredOutputsParams(regex="[ab]{2}")
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257}

    def grammars(vocab: dict[str, int]) -> compiler.Grammars:
        backend = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
        )
        # A pattern, so that a token's bytes are the library's to find.
        spaces = tokenizers.decoders.Replace(tokenizers.Regex("\u2581"), " ")
        backend.decoder = tokenizers.decoders.Sequence(
            [spaces, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        )
        tokenizer = Tokenizer(backend)
        assert not tokenizer.has_fixed_bytes
        return compiler.Grammars(tokenizer, V, (EOS,))

    bits = fill_masks([(grammars(vocab).compile(wanted).start(), [])], V)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == [ord("a"), ord("b"), 256, 257]
    with pytest.raises(RequestError, match=r"it has 258 tokens but ids up to 260.*; leave it out"):
        grammars(vocab | {"a": 258, "b": 260}).compile(wanted)


def test_output_is_always_valid(model: Qwen35Model, tokenizer: Tokenizer) -> None:
    """Random schemas, a model of random weights, high temperature."""
    draw = fresh()
    target = engine(model, tokenizer, speculative="mtp:2")
    schemas = [random_schema(draw) for _ in range(12)]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 1.0, 5.0]), seed=draw.randrange(2**40), max_tokens=100,
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=draw.random() < 0.7
            ),
        )
        for schema in schemas
    ]
    outputs = LLM(engine=target).generate([prompt_of(draw, 5) for _ in schemas], params)
    num_complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == 100
            continue
        assert answer.finish_reason == "stop"
        num_complete += 1
        jsonschema.validate(json.loads(answer.text), schema)
    print(f"{num_complete} of {len(schemas)} were complete within 100 tokens")
    assert num_complete


@pytest.mark.scenarios
@pytest.mark.parametrize("k", [1, 4, 7])
def test_b100_tokens_after_the_end_of_the_grammar_are_discarded(
    model: Qwen35Model, tokenizer: Tokenizer, library: Any, k: int  # noqa: ANN401
) -> None:
    draw = fresh()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"],
              "additionalProperties": False}
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    drawn = [
        Case(model, library, prompt_of(draw, n), wanted, seed=draw.randrange(2**40), max_tokens=12)
        for n in (3, 12)
    ]
    target = engine(model, tokenizer, speculative=f"scripted:{k}")
    cases = []
    for junk in ([EOS, 10, 50, 60, 70, 80, 90, 5], [10] * 8, [99] * 8):
        for case in drawn:
            cases.append(case)
            # All drafts are right up to the closing brace, which comes anywhere in the window.
            truth = np.array(case.prompt + case.tokens + junk, dtype=np.int64)
            keep = np.full(len(truth) + k + 1, k, dtype=np.int64)
            target.worker.scripts[len(cases)] = (truth, keep)
    assert_the_loops_tokens(target, cases)
    for case in cases:
        assert case.is_complete
        jsonschema.validate(json.loads(bytes(case.tokens).decode()), schema)


@pytest.mark.scenarios
def test_b101_the_grammar_begins_inside_the_window(
    model: Qwen35Model, tokenizer: Tokenizer, library: Any  # noqa: ANN401
) -> None:
    draw = fresh()
    k = 4
    form = r'\{"a":[0-9]{2}\}'
    wanted = StructuredOutputsParams(regex=form, beginning=FreeBeginning(closes=CLOSE))
    target = engine(model, tokenizer, speculative=f"scripted:{k}")
    cases = []
    for _ in range(2):
        case = Case(
            model, library, prompt_of(draw, 6), wanted, seed=draw.randrange(2**40),
            logit_bias={CLOSE: 3.0}, max_tokens=20,
        )
        at = case.tokens.index(CLOSE) if CLOSE in case.tokens else 0
        if case.is_complete:
            assert re.fullmatch(form, bytes(case.tokens[at + 1 :]).decode())
        for place in range(min(at, k + 1)):
            for correct in (0, 1, k):
                cases.append(case)
                truth = np.array(case.prompt + case.tokens + [0] * k, dtype=np.int64)
                # The first window begins `place` drafts before the mark; there is none before it.
                keep = np.full(len(truth) + k + 1, -1, dtype=np.int64)
                keep[len(case.prompt) + at - place - 1 :] = correct
                target.worker.scripts[len(cases)] = (truth, keep)
    print(f"{len(cases)} windows")
    assert_the_loops_tokens(target, cases)


@pytest.mark.scenarios
def test_b102_unknown_drafts_are_not_verified_and_masks_never_fail_open(
    model: Qwen35Model, tokenizer: Tokenizer, library: Any  # noqa: ANN401
) -> None:
    draw = fresh()
    cases = [
        Case(model, library, prompt_of(draw, 4), StructuredOutputsParams(regex="[a-f]{30,60}")),
        Case(model, library, prompt_of(draw, 9), None, logit_bias={EOS: -100.0}),
    ]
    target = engine(model, tokenizer, speculative="scripted:3", async_scheduling=True)
    script(target, cases, draw, keep=3)
    execute, update = target.worker.execute, target.scheduler.update
    rows_of_steps: list[tuple[int, ...]] = []

    def watch(output: Any) -> Any:  # noqa: ANN401
        rows_of_steps.append(output.verify.seq_ids if output.verify else ())
        if output.masks is not None:
            lengths = [] if output.verify is None else (output.verify.num_drafts + 1).tolist()
            lengths += [1] * len(output.known)
            for row, lines in zip(output.masks.rows, output.masks.num_lines, strict=True):
                assert lines == lengths[row], "a drafted position without a mask"
            allowed = np.unpackbits(output.masks.bits.view(np.uint8), axis=1, bitorder="little")
            assert (allowed.sum(1) <= 7).all(), "a mask allows more than six letters and the end"
        return execute(output)

    def lose(step: Any, sampled: Any) -> Any:  # noqa: ANN401
        drafts = sampled.drafts
        if drafts is not None and draw.random() < 0.5:
            drafts = np.full_like(drafts, -1)
        return update(step, dataclasses.replace(sampled, drafts=drafts))

    target.worker.execute = watch  # type: ignore[method-assign]
    target.scheduler.update = lose  # type: ignore[method-assign]
    assert_the_loops_tokens(target, cases)
    # The constrained row waits for its tokens; the other one is in every step meanwhile.
    assert (2,) in rows_of_steps
    places = [place for place, rows in enumerate(rows_of_steps) if 2 in rows]
    assert places == list(range(places[0], places[-1] + 1))
    assert target.num_early_enqueues


def test_samples_of_one_request_follow_grammars_of_their_own(
    model: Qwen35Model, tokenizer: Tokenizer
) -> None:
    target = engine(model, tokenizer)
    wanted = StructuredOutputsParams(regex="[a-z]{4,12}X")
    params = SamplingParams(
        n=4, temperature=2.0, seed=3, max_tokens=30, structured_outputs=wanted
    )
    outputs = LLM(engine=target).generate([[5, 6, 7]], params)[0].outputs
    assert len({output.text for output in outputs}) > 1
    assert all(re.fullmatch("[a-z]{4,12}X", output.text) for output in outputs)


def test_text_ends_with_the_grammar_and_a_stop_token_is_not_text(
    model: Qwen35Model, tokenizer: Tokenizer
) -> None:
    target = engine(model, tokenizer)

    def ask(**wanted: Any) -> Any:  # noqa: ANN401
        params = SamplingParams(
            temperature=3.0, seed=1, max_tokens=60, min_tokens=0,
            structured_outputs=StructuredOutputsParams(**wanted),
        )
        return LLM(engine=target).generate([[9, 8]], params)[0].outputs[0]

    closed = ask(choice=["yes", "no"])
    assert closed.text in ("yes", "no")
    assert len(closed.token_ids) == len(closed.text)
    open_ended = ask(grammar='root ::= "a" [b-c]*\n')
    if open_ended.finish_reason == "stop":
        assert open_ended.token_ids[-1] == EOS
        assert open_ended.text == bytes(open_ended.token_ids[:-1]).decode()
    assert re.fullmatch("a[bc]*", open_ended.text)


BAD = [
    ({"json": {"type": "objectx"}}, "JSON schema .* objectx"),
    ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys: .*uniqueItems"),
    ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "Unimplemented keys"),
    ({"json": {"properties": {"a": {"const": 2**53 + 1}}}}, "9007199254740993, .* be rounded"),
    ({"json": {"anyOf": [{"enum": ["a", -(2**60)]}]}}, "the number -1152921504606846976"),
    ({"json": False}, "allows nothing"),
    ({"json": "{"}, "no JSON"),
    ({"json": "[1]"}, "a schema is an object, got list"),
    ({"json": {"enum": ["x" * 300_000]}}, "300014 characters but at most 262144"),
    ({"json": {"a": {1, 2}}}, "no JSON"),
    ({"regex": "(("}, "the regex .* unclosed group"),
    ({"regex": ""}, "regex must be text that is not empty"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "root ::= ("}, "the grammar cannot be used"),
    ({"regex": "[^\\d\\D]"}, "nothing fits it"),
    ({"grammar": "start: start"}, "nothing fits it"),
    ({"choice": []}, "choice must be a list"),
    ({"choice": "ab"}, "choice must be a list"),
    ({"choice": 5}, "choice must be a list"),
    ({"json_object": "x"}, "json_object must be true or false"),
    ({"choice": ["a"] * 5000}, "5000 texts but at most 4096"),
    ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
    ({"regex": "a", "json_object": True}, "got regex and json_object"),
]


@pytest.mark.parametrize(("wanted", "said"), BAD)
def test_a_wrong_form_is_refused_with_its_fault(
    model: Qwen35Model, tokenizer: Tokenizer, wanted: dict[str, Any], said: str
) -> None:
    target = engine(model, tokenizer)
    with pytest.raises(RequestError, match=said) as refused:
        target.add_request(
            "a", [5], SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
        )
    assert refused.value.param == "structured_outputs"
    assert not target.has_work()


def test_what_could_leave_no_token_is_refused(model: Qwen35Model, tokenizer: Tokenizer) -> None:
    wanted = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="allowed_token_ids could leave no token"):
        SamplingParams(structured_outputs=wanted, allowed_token_ids=[5])
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    target = engine(model, tokenizer)
    target.grammars = None
    with pytest.raises(RequestError, match="needs a tokenizer"):
        target.add_request("a", [5], SamplingParams(structured_outputs=wanted))


def test_grammars_are_compiled_once_and_forgotten_when_many(
    model: Qwen35Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(model, tokenizer)
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    assert target.grammars is not None
    for name in "aabacdbea":
        target.grammars.compile(StructuredOutputsParams(regex=name))
    # a b c d; b again, which made way for d; e; a again, which made way for b.
    assert target.grammars.num_compiled == 7


def test_a_grammar_that_gives_up_ends_its_request_alone(
    model: Qwen35Model, tokenizer: Tokenizer, library: Any  # noqa: ANN401
) -> None:
    draw = fresh()
    free = Case(model, library, prompt_of(draw, 5), None, temperature=0.0)
    target = engine(model, tokenizer)
    request = target.add_request(
        "bad", [5, 6], SamplingParams(
            max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-f]{20,30}")
        ),
    )
    target.add_request("free", free.prompt, free.params)
    outputs = {}
    while target.has_work():
        if request.sequences[0].num_output_tokens == 4:
            # What the library does when a limit is reached: an error that stays.
            grammar = request.sequences[0].grammar
            assert grammar is not None
            grammar._matcher.consume_token(50)  # type: ignore[attr-defined]
        for output in target.step():
            outputs[output.request_id] = output
    bad = outputs["bad"].outputs[0]
    assert bad.finish_reason == "error"
    assert bad.stop_reason
    assert re.fullmatch("[a-f]{4,6}", bad.text)
    assert outputs["free"].outputs[0].token_ids == free.tokens


def test_text_that_looks_like_a_mark_is_written_in_letters(model: Qwen35Model) -> None:
    """A mark that is a token of its own is no text: the letters are other tokens."""
    backend = tokenizers.Tokenizer.from_str(ascii_tokenizer(V, num_reserved=4).to_json())
    backend.add_tokens([
        tokenizers.AddedToken("<think>", special=False, normalized=False),
        tokenizers.AddedToken("<|x|>", special=True, normalized=False),
    ])
    target = engine(model, Tokenizer(backend))
    for text in ("<think>", "a<|x|>b", "<<think>>"):
        for wanted in (
            StructuredOutputsParams(choice=[text]),
            StructuredOutputsParams(json={"const": text}),
            StructuredOutputsParams(regex=re.escape(text)),
        ):
            params = SamplingParams(max_tokens=40, structured_outputs=wanted)
            output = LLM(engine=target).generate([[9, 8]], params)[0].outputs[0]
            assert output.finish_reason == "stop", (text, wanted, output)
            assert output.text == (json.dumps(text) if wanted.kind == "json" else text)


HOSTILE = [
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": r"(\w{1,900} ){1,900}"},
    {"regex": "(a|aa|aaa)*b{5000}"},
    {"regex": "(.*a.*b){40}"},
    {"regex": "&".join(f"(.*[{c}].*)" for c in "abcdefghij")},
    {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6}},
    {"json": {"$ref": "#"}},
    {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    {"json": {"type": "string", "pattern": "^(a+)+$", "minLength": 10**5}},
    {"json": {"properties": {f"p{n}": {"anyOf": [{"type": "string"}] * 9} for n in range(900)}}},
    {"json": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
    {"grammar": "start: " + " ".join(["a?"] * 1000) + '\na: "x" | start'},
    {"grammar": "start: start start | /a*/"},
    {"choice": [str(n) * 40 for n in range(3000)]},
]


@pytest.mark.timeout(120)  # What is not bounded takes minutes, or all memory.
@pytest.mark.parametrize("wanted", HOSTILE, ids=lambda wanted: next(iter(wanted)))
def test_a_hostile_form_is_refused_or_bounded(
    tokenizer: Tokenizer, wanted: dict[str, Any]
) -> None:
    grammars = compiler.Grammars(tokenizer, V, (EOS,))
    try:
        state = grammars.compile(StructuredOutputsParams(**wanted)).start()
    except RequestError as error:
        print(error)
        return
    for _ in range(3):
        bits = fill_masks([(state, [])], V)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        assert allowed.size
        if state.error is not None or state.advance(int(allowed[-1])):
            break


def test_compiling_holds_up_its_own_request_alone(
    model: Qwen35Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    target = engine(model, tokenizer)
    compile_now = target.compile_grammar
    threads = []

    def compile_late(params: SamplingParams) -> Any:  # noqa: ANN401
        threads.append(threading.current_thread().name)
        assert params.structured_outputs is None or go.wait(30)
        return compile_now(params)

    monkeypatch.setattr(target, "compile_grammar", compile_late)
    wanted = StructuredOutputsParams(choice=["yes", "no"])

    async def ask(llm: AsyncLLM, params: SamplingParams) -> str:
        outputs = [output async for output in llm.generate([5, 6], params)]
        return outputs[-1].outputs[0].text

    async def both() -> tuple[str, str]:
        llm = AsyncLLM(engine=target)
        slow = asyncio.create_task(ask(llm, SamplingParams(structured_outputs=wanted)))
        fast = await ask(llm, SamplingParams(max_tokens=3, ignore_eos=True))
        assert not slow.done()
        go.set()
        text = await slow
        monkeypatch.setattr(async_llm, "_COMPILE_S", 0.01)
        go.clear()
        with pytest.raises(RequestError, match=r"could not be compiled within 0.01 s"):
            await ask(llm, SamplingParams(structured_outputs=wanted))
        go.set()
        await llm.shutdown()
        return fast, text

    assert asyncio.run(both())[1] in ("yes", "no")
    assert all(name.startswith("headrace-grammar") for name in threads if "engine" not in name)
    assert any(name.startswith("headrace-grammar") for name in threads)
