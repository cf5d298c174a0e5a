"""The real engine as a target: every request served on the simulated device equals the reference.

A seed decides everything: the model's weights, layout, scheme, drafter, depth, pool sizes, budget,
prompts with shared prefixes, several completions of one prompt, grammars, arrivals, aborts,
preemptions, forks of generating sequences and cache resets. The models are tiny and made so that
their state matters; the grid and the state blocks are 16 tokens, so that chunk ends, columns and
checkpoints come often.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from headrace import rt
from headrace.check.token_rules import TokenRules
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.engine.sequence import Sequence
from headrace.models.reference_loop import (
    RUNNING,
    build_caches,
    greedy,
    prompt_batch,
    run_reference,
)
from headrace.parallel.steps import LocalRanks
from headrace.sampling_params import SamplingParams, completion_seed
from headrace.testing import tiny_family, tiny_parts
from headrace.worker.sampler import SamplingTensors, sample

if TYPE_CHECKING:
    from collections.abc import Sequence as Listing

    from torch import Tensor

    from headrace.outputs import RequestOutput, TokenLogprob

VOCAB = 48
GRID = 16
NUM_MTP_MODELS = 2
"""The first models are alike and have an MTP head; the others show what else there is."""
_MAX_LEN = 96
_SCORE_TOLERANCE = 1e-4
_FIRST_FORK = 10**6
"""Sequences that the workload forks have ids of their own."""
_QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3_5", _QWEN),
    ("qwen3_5", _QWEN),
    ("granite", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}),
    ("lfm2", {"num_hidden_layers": 2, "full_attn_idxs": [1]}),
    # Nothing attends: its KV blocks hold token ids and no more.
    ("falcon_mamba", {"num_hidden_layers": 2}),
    # A state and keys in every layer; an MTP head of several layers; blocks that layers share.
    ("falcon_h1", {"num_hidden_layers": 2}),
    ("nemotron_h", {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E"}),
    (
        "zamba2",
        {
            "num_hidden_layers": 2,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
        },
    ),
    # Values are the beginnings of keys: one of the two KV pools is empty.
    (
        "kimi_linear",
        {
            "num_hidden_layers": 2,
            "linear_attn_config": None,
            "linear_head_dim": 12,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    # A state without a convolution window.
    (
        "minimax",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
)
_WITH_MTP = (*range(NUM_MTP_MODELS), 6)
_NUM_MODELS = len(_MODELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRequest:
    """One request of a workload.

    Attributes:
        prompt: Its tokens.
        num_tokens: Tokens to generate.
        num_completions: Sequences that fork off its prompt; several draw their tokens.
        seed: Of their noise.
        rules: Key of the grammar that its outputs follow, or 0.
        bias: Token, and what is added to its logits.
        penalty: Taken off the logits of tokens that it has generated.
        logprobs: Likeliest tokens reported at each output position, -1 for all, or None.
        prompt_logprobs: The same for its prompt.
        arrival: Engine step at which it is added.
        abort_after: Steps after arrival at which it is aborted, or None.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    num_completions: int
    seed: int
    rules: int
    bias: tuple[int, float] | None
    penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    arrival: int
    abort_after: int | None

    @property
    def temperature(self) -> float:
        """Completions that differ show it if one takes another's blocks."""
        return 0.0 if self.num_completions == 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorkload:
    """Everything a seed decides.

    Attributes:
        config: The engine's settings.
        model_seed: Which model.
        requests: In order of arrival.
        preempt_at: Steps before which the youngest running sequence is preempted.
        reset_at: Steps before which the prefix cache is reset.
        fork_at: Steps before which a sequence forks off a generating one that has no step in
            flight, if there is one.
        has_files: Whether the state store keeps files, and nothing in memory.
    """

    config: EngineConfig
    model_seed: int
    requests: tuple[RealRequest, ...]
    preempt_at: frozenset[int]
    reset_at: frozenset[int]
    fork_at: frozenset[int]
    has_files: bool = False


def generate_real(seed: int, *, may_store: bool = True) -> RealWorkload:
    """Make the workload of a seed.

    Args:
        seed: The seed.
        may_store: Whether it may have a state store, and requests that come once more to hit there.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload, no secret
    forks = random.Random(seed + 1)  # noqa: S311
    grammars = random.Random(seed + 2)  # noqa: S311
    captures = random.Random(seed + 3)  # noqa: S311
    asks = random.Random(seed + 4)  # noqa: S311
    stores = random.Random(seed + 5)  # noqa: S311
    drafter = rng.choice(
        ["none", "scripted:1", "scripted:3", "scripted:5", "ngram:3", "mtp:2", "draft:x:2"]
    )
    num_drafts = 0 if drafter == "none" else int(drafter[-1])
    scheme: Literal["columns", "replay"] = rng.choice(("columns", "replay"))
    intervals = [n for n in (1, 2, 4, 8, 16) if n > num_drafts]
    is_tight = rng.random() < 0.5  # noqa: PLR2004
    config = EngineConfig(
        model="tiny",
        device="cpu",
        max_num_seqs=rng.choice([2, 3, 5]),
        max_num_batched_tokens=rng.choice([16, 24, 48, 128]),
        max_model_len=_MAX_LEN,
        block_size=8,
        scan_grid=GRID,
        state_block_size=rng.choice([16, 16, 32]),
        num_kv_blocks=rng.choice([15, 18, 24]) if is_tight else 80,
        num_state_blocks=(10 + num_drafts) if is_tight else 48,
        prefix_cache=rng.choice(["align", "align", "align", "none"]),
        checkpoint_retention=rng.choice(["latest", "latest", "all", "every:32"]),
        batch_layout=rng.choice(["slots", "compact"]),
        state_scheme=scheme,
        replay_interval=rng.choice(intervals) if scheme == "replay" else None,
        speculative=drafter,
        async_scheduling=rng.random() < 0.8,  # noqa: PLR2004
        graphs=captures.choice(("on", "off")),
        check_invariants=True,
    )
    has_store = may_store and config.prefix_cache == "align" and stores.random() < 0.6  # noqa: PLR2004
    if has_store:
        config = replace(
            config,
            state_store_memory=stores.choice([4096, 2**20]),
            state_store_step_bytes=stores.choice([1, 2**10, 2**20]),
        )
    shared = [rng.randrange(2, VOCAB) for _ in range(_MAX_LEN)]
    requests = []
    for _ in range(rng.randrange(3, 7)):
        length = rng.choice([1, 2, 3, 1 + num_drafts, 15, 16, 17, 31, 33, rng.randrange(1, 60)])
        common = min(length, rng.choice([0, 0, 8, 16, 20, 32, 48]))
        own = [rng.randrange(2, VOCAB) for _ in range(length - common)]
        requests.append(
            RealRequest(
                prompt=tuple(shared[:common] + own),
                num_tokens=rng.choice([1, 2, 5, 9, 14]),
                num_completions=forks.choice([1, 1, 1, 1, 2, 3]),
                seed=forks.randrange(2**31),
                rules=grammars.choice([0, 0, 0, grammars.randrange(1, 2**15)]),
                bias=asks.choice([None, None, None, (asks.randrange(2, VOCAB), 2.5)]),
                penalty=asks.choice([0.0, 0.0, 0.0, 1.5]),
                logprobs=asks.choice([None, None, None, None, 2, -1]),
                prompt_logprobs=asks.choice([None, None, None, None, 2, -1]),
                arrival=rng.choice([0, 0, 1, 2, 4, 7, 12]),
                abort_after=rng.randrange(0, 8) if rng.random() < 0.15 else None,  # noqa: PLR2004
            )
        )
    steps = range(1, 25)
    # What the device has to give up comes back from the store, while it runs or when it is asked
    # for again.
    forgets = stores.sample(range(6, 40), 3) if has_store else []
    for arrival in forgets:
        longest = sorted(requests, key=lambda request: len(request.prompt))[-3:]
        again = stores.choice(longest)
        requests.append(replace(again, arrival=arrival, prompt_logprobs=None, abort_after=None))
    requests.sort(key=lambda request: request.arrival)
    return RealWorkload(
        config=config,
        model_seed=rng.choice(_WITH_MTP if drafter.startswith("mtp") else range(_NUM_MODELS)),
        requests=tuple(requests),
        preempt_at=frozenset(rng.sample(steps, rng.choice([0, 0, 1, 2]))),
        reset_at=frozenset([*rng.sample(steps, rng.choice([0, 0, 0, 1])), *forgets]),
        fork_at=frozenset(forks.sample(steps, 8)),
        has_files=has_store and stores.random() < 0.3,  # noqa: PLR2004
    )


class RealTarget:
    """headrace's own engine."""

    name = "engine"
    kinds: tuple[str, ...] = (
        "kv_block",
        "recurrent_state",
        "conv_window",
        "ring",
        "accepted_counts",
        "sampled_tokens",
        "staging_slot",
        "landing_slot",
    )
    overlaps: tuple[str, ...] = (
        "forward with forward",
        "forward with input copy",
        "forward with read-back",
        "forward with slot reuse",
        "forward with row compaction",
    )
    min_accesses_per_step = 40.0

    def __init__(self) -> None:
        self.num_steady_steps = 0
        self.num_early_steps = 0

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        """See `Target.run`."""
        self.num_steady_steps = self.num_early_steps = 0
        workload = generate_real(seed)
        others: tuple[rt.Runtime, ...] = ()
        if seed % 4 == 1:
            # Two devices share a model. The second one never makes the first one wait for its host.
            others = (rt.Runtime.create("sim", seed=seed, policy="eager"),)
            workload = on_two_devices(workload)
        with TemporaryDirectory() as folder:
            engine = make_engine(workload, runtime, folder, others)
            answers = serve(workload, engine)
            engine.close()
        runtime.finish()
        is_async = workload.config.async_scheduling
        self.num_steady_steps = engine.num_steady_steps if is_async else 0
        self.num_early_steps = engine.num_early_enqueues if is_async else 0
        return [
            f"{text} in workload {seed} with {workload.config}"
            for text in (
                *wrong_answers(workload, answers),
                *(f"another rank: {report}" for other in others for report in other.finish()),
            )
        ]


def on_two_devices(workload: RealWorkload) -> RealWorkload:
    """The workload on a model that two devices can share; they have no state store."""
    return replace(
        workload,
        config=replace(
            workload.config, tensor_parallel_size=2, state_store=None, state_store_memory=0
        ),
        model_seed=workload.model_seed % NUM_MTP_MODELS,
        has_files=False,
    )


def make_engine(
    workload: RealWorkload,
    runtime: rt.Runtime,
    folder: str,
    others: tuple[rt.Runtime, ...] = (),
) -> Engine:
    """Build the engine of a workload on a runtime.

    Args:
        workload: The workload.
        runtime: The simulated device, or that of rank 0.
        folder: For the files of its state store, if it has any.
        others: Devices of other ranks, if several share the model.
    """
    draft = model_of(workload.model_seed + _NUM_MODELS)
    config = workload.config
    if others:
        family, shape = _MODELS[workload.model_seed]
        groups = rt.local_groups(1 + len(others))
        models = tiny_parts(family, groups, workload.model_seed, vocab_size=VOCAB, **shape)
        return make_parallel_engine(config, models, (runtime, *others), draft_model=draft)
    if workload.has_files:
        config = replace(config, state_store=folder, state_store_memory=0)
    parts = load_parts(
        config, model=model_of(workload.model_seed), draft_model=draft, runtime=runtime,
        fingerprints=(f"tiny {workload.model_seed}",),
    )
    return Engine(config, parts=parts)


def make_parallel_engine(
    config: EngineConfig,
    models: Listing[Any],
    runtimes: Listing[rt.Runtime],
    *,
    draft_model: Any = None,  # noqa: ANN401
) -> Engine:
    """Build the engine of a model whose parts are in this process.

    Args:
        config: Settings; tensor_parallel_size is the number of parts.
        models: The parts, in the order of their ranks.
        runtimes: A device for each.
        draft_model: The model of `--speculative draft`, of which every rank has all.

    Returns:
        The engine of rank 0; `close` ends the threads of the others.
    """
    parts, *rest = (
        load_parts(config, model=model, draft_model=draft_model, runtime=runtime)
        for model, runtime in zip(models, runtimes, strict=True)
    )
    for other in rest:
        # Drafts that tests make up are the same on all ranks.
        other.worker.scripts = parts.worker.scripts
    others = LocalRanks([other.worker for other in rest])
    return Engine(config, parts=replace(parts, others=others))


@dataclass(slots=True)
class Answers:
    """What a workload gave.

    Attributes:
        tokens: Of each request, each completion.
        outputs: Of each request, the last.
        forks: Sequences that forked off a generating one, and which completion that was.
    """

    tokens: list[list[list[int]]]
    outputs: list[RequestOutput | None]
    forks: list[tuple[Sequence, int, int]]


def wrong_answers(workload: RealWorkload, answers: Answers) -> list[str]:
    """One sentence for each completion or fork that differs from the plain loop's tokens."""
    wrong = []
    for index, (request, tokens) in enumerate(zip(workload.requests, answers.tokens, strict=True)):
        for place, got in enumerate(tokens):
            expected = reference(workload.model_seed, request, place)
            is_short = request.abort_after is None and len(got) != len(expected)
            if got != expected[: len(got)] or is_short:
                wrong.append(
                    f"completion {place} of request {index} got {got} instead of {expected}"
                )
    for index, output in enumerate(answers.outputs):
        if output is not None:
            wrong += wrong_scores(workload.model_seed, workload.requests[index], output)
    for seq, index, place in answers.forks:
        expected = reference(workload.model_seed, workload.requests[index], place)
        if seq.output_token_ids != expected:
            wrong.append(
                f"a fork of completion {place} of request {index} got {seq.output_token_ids} "
                f"instead of {expected}"
            )
    return wrong


def wrong_scores(model_seed: int, request: RealRequest, output: RequestOutput) -> list[str]:
    """One sentence for each list of log-probabilities that differs from the plain loop's."""
    wrong = []
    if request.logprobs is not None:
        for done in output.outputs:
            _, logits = _run(model_seed, request, done.index)
            if not _scores_agree(done.logprobs or [], logits, list(done.token_ids)):
                wrong.append(
                    f"completion {done.index} of request {output.request_id} got other "
                    "log-probabilities"
                )
    # An abort may come before the prompt's end.
    if request.prompt_logprobs is not None and any(done.token_ids for done in output.outputs):
        entries = (output.prompt_logprobs or [None])[1:]
        logits = _prompt_logits(model_seed, request.prompt)
        if not _scores_agree(entries, logits, list(request.prompt[1:])):
            wrong.append(f"the prompt of request {output.request_id} got other log-probabilities")
    return wrong


def _scores_agree(
    entries: Listing[dict[int, TokenLogprob] | None], logits: Tensor, tokens: list[int]
) -> bool:
    if len(entries) != len(tokens):
        return False
    expected = torch.log_softmax(logits[: len(tokens)], dim=-1)
    return all(
        entry is not None and token in entry
        and all(abs(float(line[t]) - one.logprob) <= _SCORE_TOLERANCE for t, one in entry.items())
        for entry, token, line in zip(entries, tokens, expected, strict=True)
    )


def serve(workload: RealWorkload, engine: Engine) -> Answers:
    """Serve every request; returns the tokens each one got."""
    answers: list[list[list[int]]] = [[] for _ in workload.requests]
    outputs: list[RequestOutput | None] = [None] * len(workload.requests)
    forks: list[tuple[Sequence, int, int]] = []
    rng = random.Random(workload.model_seed)  # noqa: S311
    waiting = list(enumerate(workload.requests))
    aborts: dict[int, list[int]] = {}
    step = 0
    while waiting or engine.has_work():
        while waiting and waiting[0][1].arrival <= step:
            index, request = waiting.pop(0)
            _add(engine, workload, index, request, rng)
            if request.abort_after is not None:
                aborts.setdefault(step + request.abort_after, []).append(index)
        for index in aborts.pop(step, []):
            output = engine.abort(str(index))
            if output is not None:
                answers[index] = [list(done.token_ids) for done in output.outputs]
                outputs[index] = output
        forks.extend(_disturb(engine, workload, step, rng))
        for output in engine.step():
            if output.outputs:
                index = int(output.request_id)
                answers[index] = [list(done.token_ids) for done in output.outputs]
                outputs[index] = output
        step += 1
    return Answers(answers, outputs, forks)


def _add(
    engine: Engine, workload: RealWorkload, index: int, request: RealRequest, rng: random.Random
) -> None:
    params = SamplingParams(
        n=request.num_completions, temperature=request.temperature, seed=request.seed,
        max_tokens=request.num_tokens, ignore_eos=True, presence_penalty=request.penalty,
        logit_bias=None if request.bias is None else dict([request.bias]),
        logprobs=request.logprobs, prompt_logprobs=request.prompt_logprobs,
    )
    added = engine.add_request(
        str(index), list(request.prompt), params,
        grammar=TokenRules(request.rules, VOCAB) if request.rules else None,
    )
    if engine.worker.drafter == "scripted":
        most = engine.parts.sizes.max_drafts
        for place, seq in enumerate(added.sequences):
            truth = reference(workload.model_seed, request, place)
            tokens = np.array([*request.prompt, *truth], dtype=np.int64)
            keep = np.array([rng.randrange(-1, most + 1) for _ in range(_MAX_LEN)], dtype=np.int64)
            engine.worker.scripts[seq.seq_id] = (tokens, keep)


def _disturb(
    engine: Engine, workload: RealWorkload, step: int, rng: random.Random
) -> list[tuple[Sequence, int, int]]:
    """Preempt, forget and fork as the workload says; returns what has forked."""
    if step in workload.preempt_at and engine.scheduler.running:
        engine.scheduler.preempt(engine.scheduler.running[-1])
    if step in workload.reset_at:
        engine.reset_prefix_cache()
    return _fork(engine, step, rng) if step in workload.fork_at else []


def _fork(engine: Engine, step: int, rng: random.Random) -> list[tuple[Sequence, int, int]]:
    """Fork a generating sequence that has no step in flight, if there is one."""
    owners = engine._owner  # noqa: SLF001 - which request a sequence is of
    ready = [
        seq for seq in engine.scheduler.running
        if seq.num_output_tokens and not seq.num_in_flight
        and seq.num_computed_tokens >= seq.known_end and seq.seq_id in owners
    ]
    if not ready:
        return []
    parent = rng.choice(ready)
    request, place = owners[parent.seq_id]
    child = Sequence(
        seq_id=_FIRST_FORK + step,  # One a step: a parent may fork twice at the same length.
        prompt=request.prompt_token_ids, params=parent.params, seed=parent.seed,
        num_groups=len(engine.scheduler.state_pools),
    )
    if parent.seq_id in engine.worker.scripts:
        engine.worker.scripts[child.seq_id] = engine.worker.scripts[parent.seq_id]
    if not engine.scheduler.fork(parent, child):
        return []
    return [(child, int(request.request_id), place)]


@lru_cache(maxsize=2 * _NUM_MODELS)
def model_of(seed: int) -> Any:  # noqa: ANN401 - any class of headrace.models
    """A tiny model whose state matters."""
    family, shape = _MODELS[seed % _NUM_MODELS]
    return tiny_family(family, seed, vocab_size=VOCAB, **shape)


@lru_cache(maxsize=4096)
def _reference(
    model_seed: int,
    prompt: tuple[int, ...],
    num_tokens: int,
    seed: int | None,
    rules: int,
    bias: tuple[int, float] | None,
    penalty: float,
) -> tuple[tuple[int, ...], Tensor]:
    state = TokenRules(rules, VOCAB) if rules else None
    num_needed = num_tokens
    has_occurred = torch.zeros(VOCAB, dtype=torch.bool)

    def choose(logits: Tensor, position: int) -> int:
        nonlocal num_needed
        if position - len(prompt) >= num_needed:
            return 0  # The grammar has ended.
        logits = logits.clone()
        if bias is not None:
            logits[bias[0]] += bias[1]
        logits = torch.where(has_occurred, logits - penalty, logits)
        if state is not None:
            logits = logits.masked_fill(~torch.from_numpy(state.allowed()), -torch.inf)
        token = greedy(logits, position) if seed is None else draw(logits, position)
        has_occurred[token] = True
        if state is not None and state.advance(token):
            num_needed = position - len(prompt) + 1
        return token

    def draw(logits: Tensor, position: int) -> int:
        assert seed is not None
        one = torch.ones(1)
        tensors = SamplingTensors(
            temperature=one, top_k=torch.tensor([VOCAB]), top_p=2.0 * one, min_p=0.0 * one,
            seed=torch.tensor([seed - 2**64 if seed >= 2**63 else seed]),
            position=torch.tensor([position]),
        )
        return int(sample(logits[None], tensors, is_all_greedy=False, filters=False)[0])

    run = run_reference(
        model_of(model_seed), list(prompt), num_tokens, scan_grid=GRID,
        choose=choose,
    )
    return tuple(run.tokens[:num_needed]), run.logits[:num_needed]


def reference(model_seed: int, request: RealRequest, completion: int = 0) -> list[int]:
    """The plain loop's tokens for one completion of a request."""
    return list(_run(model_seed, request, completion)[0])


def _run(model_seed: int, request: RealRequest, completion: int) -> tuple[tuple[int, ...], Tensor]:
    """Tokens, and the raw logits that each of them was chosen from."""
    seed = completion_seed(request.seed, completion) if request.temperature else None
    return _reference(
        model_seed, request.prompt, request.num_tokens, seed, request.rules, request.bias,
        request.penalty,
    )


@lru_cache(maxsize=1024)
def _prompt_logits(model_seed: int, prompt: tuple[int, ...]) -> Tensor:
    """Raw logits at each position of a prompt, [tokens, vocabulary]."""
    model = model_of(model_seed)
    caches = build_caches(model, max_tokens=len(prompt), state_blocks=RUNNING + 1)
    batch = prompt_batch(model, prompt, 0, len(prompt), (), scan_grid=GRID)
    return model.logits(model.forward(batch, caches)[: len(prompt)])
