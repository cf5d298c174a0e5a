"""What the engine's tests and the matrix share: a small model, one engine per case, and its oracle.

The oracle is `headrace.models.reference_loop`, one sequence and one token at a time; it knows
nothing of the engine or the worker. Everything is compared bit for bit: tokens, all logits (as
log-probabilities), and the states at every published checkpoint.
"""

from __future__ import annotations

import itertools
import random
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.engine.prefix_cache import chain_keys, root_key
from headrace.models.reference_loop import ReferenceRun, run_reference
from headrace.sampling_params import SamplingParams
from headrace.testing import tiny_model
from headrace.worker.sampler import SamplingTensors, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.models.batch import Kernels
    from headrace.outputs import RequestOutput

GRID = 16
"""Scan grid of the tests, so that short prompts have boundaries."""
VOCAB = 64
MAX_LEN = 96
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=-1)


def small_model(seed: int, **overrides: Any) -> Any:  # noqa: ANN401
    """One recurrent layer, one attention layer and an MTP head; the state matters."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return tiny_model(seed=seed, **(settings | overrides))


def make_engine(
    model: Any,  # noqa: ANN401
    *,
    draft_model: Any = None,  # noqa: ANN401
    weights: str = "tiny",
    **options: Any,  # noqa: ANN401
) -> Engine:
    """Build an engine around a model; invariants are checked after every step.

    Args:
        model: The model.
        draft_model: For `draft:x:K`.
        weights: What a state store knows them by.
        options: Fields of EngineConfig.
    """
    config = make_config(**options)
    parts = load_parts(config, model=model, draft_model=draft_model, fingerprints=(weights,))
    return Engine(config, parts=parts)


def make_config(**options: Any) -> EngineConfig:  # noqa: ANN401
    """Settings of a small engine that checks itself."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "max_num_seqs": 4,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": 64,
        "scan_grid": GRID,
        "state_block_size": GRID,
        "block_size": BLOCK,
        "speculative": "none",
        "check_invariants": True,
    }
    return EngineConfig(**(settings | options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    mode: str = "async"
    layout: str = "slots"
    scheme: str = "columns"
    cache: str = "align"
    drafts: str = "none"
    budget: int = 40
    pools: str = "roomy"
    unit: int = GRID
    graphs: str = "off"
    kernels: str = "torch"

    @property
    def num_drafts(self) -> int:
        """K."""
        return 0 if self.drafts == "none" else int(self.drafts.rpartition(":")[2])

    def options(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        scheme, _, interval = self.scheme.partition(":")
        options: dict[str, Any] = {
            "async_scheduling": self.mode == "async",
            "batch_layout": self.layout,
            "graphs": self.graphs,
            "kernels": self.kernels,
            "state_scheme": scheme,
            "prefix_cache": self.cache,
            "speculative": self.drafts,
            "max_num_batched_tokens": self.budget,
            "state_block_size": self.unit,
            "replay_interval": int(interval) if interval else None,
            # Outside bitwise mode generated boundaries are published too, and can be checked.
            "deterministic": self.budget % 2 == 0,
        }
        if self.pools == "tight":
            per_sequence = -(-(MAX_LEN + self.num_drafts) // BLOCK) + 1
            options["num_kv_blocks"] = per_sequence + 2
            options["num_state_blocks"] = (9 if scheme == "columns" else 8) + self.num_drafts
        return options


def pairwise(factors: Mapping[str, Sequence[Any]], *, seed: int) -> list[Case]:
    """Cases in which every two values of any two factors occur together."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }

    def covered(values: dict[str, Any]) -> set[Any]:
        return {
            ((a, values[a]), (b, values[b])) for a, b in itertools.combinations(names, 2)
        } & missing

    cases = []
    while missing:
        anchor = rng.choice(sorted(missing, key=repr))
        best: dict[str, Any] = {}
        best_count = 0
        for _ in range(40):
            values = {name: rng.choice(factors[name]) for name in names} | dict(anchor)
            if (count := len(covered(values))) > best_count:
                best, best_count = values, count
        missing -= covered(best)
        cases.append(Case(**best))
    return cases


@dataclass(slots=True)
class Job:
    """One request and its oracle's answer."""

    prompt: list[int]
    params: SamplingParams = GREEDY
    run: ReferenceRun | None = None
    script: tuple[np.ndarray, np.ndarray] | None = None
    keep: list[int] = field(default_factory=list)


def seeded_choice(params: SamplingParams) -> Callable[[torch.Tensor, int], int]:
    """The sampler on one row alone."""

    def choose(logits: torch.Tensor, position: int) -> int:
        seed = params.seed
        assert seed is not None
        tensors = SamplingTensors(
            temperature=torch.tensor([params.temperature], dtype=torch.float32),
            top_k=torch.tensor([params.top_k or logits.shape[0]]),
            top_p=torch.tensor([params.top_p if params.top_p < 1.0 else 2.0]),
            min_p=torch.tensor([params.min_p], dtype=torch.float32),
            seed=torch.tensor([seed]),
            position=torch.tensor([position]),
        )
        token = sample(logits[None], tensors, is_all_greedy=False, filters=True)
        return int(token[0])

    return choose


def solve(
    model: Any,  # noqa: ANN401
    job: Job,
    *,
    states: bool = False,
    kernels: Kernels = "torch",
) -> Job:
    """Fill in the oracle's answer."""
    params = job.params
    assert params.max_tokens is not None
    count = min(params.max_tokens, MAX_LEN - len(job.prompt))
    end = len(job.prompt) + count
    # With drafts the last token may be computed too.
    boundaries = range(GRID, end + 1, GRID) if states else ()
    extra = {} if params.temperature == 0.0 else {"choose": seeded_choice(params)}
    job.run = run_reference(
        model, job.prompt, count, scan_grid=GRID, states_at=list(boundaries), kernels=kernels,
        **extra,
    )
    return job


def make_jobs(
    model: Any,  # noqa: ANN401
    rng: random.Random,
    lengths: Sequence[int],
    kernels: Kernels = "torch",
) -> list[Job]:
    """Prompts that share prefixes, greedy and seeded ones, with their answers.

    None goes on where another one's answer begins, as one in fifty would by chance: outside bitwise
    mode it would hit states of generated tokens, of which no bits are promised.
    """
    while True:
        jobs = _jobs(model, rng, lengths, kernels)
        begun = [job.prompt + job.run.tokens[:1] for job in jobs if job.run is not None]
        if not any(job.prompt[: len(start)] == start for job in jobs for start in begun):
            return jobs


def _jobs(
    model: Any,  # noqa: ANN401
    rng: random.Random,
    lengths: Sequence[int],
    kernels: Kernels,
) -> list[Job]:
    base = [rng.randrange(2, VOCAB) for _ in range(MAX_LEN)]
    jobs = []
    for index, length in enumerate(lengths):
        shared = rng.choice((0, length // 2, length - 1, min(length, 2 * GRID)))
        prompt = base[:shared] + [rng.randrange(2, VOCAB) for _ in range(length - shared)]
        params = replace(GREEDY, max_tokens=rng.randint(1, 24))
        if index % 3 == 2:
            params = replace(
                params, temperature=rng.uniform(0.3, 2.0), top_k=rng.choice((0, 5, 20)),
                top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(2**31),
            )
        jobs.append(solve(model, Job(prompt, params), states=True, kernels=kernels))
    return jobs


def script_for(job: Job, num_drafts: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are right for the first `keep` drafts of a proposal; -1 proposes nothing."""
    assert job.run is not None
    tokens = np.array(job.prompt + job.run.tokens, dtype=np.int64)
    keep = np.array(
        [rng.choice((-1, *range(num_drafts + 1), num_drafts)) for _ in range(len(tokens) + 8)],
        dtype=np.int64,
    )
    return tokens, keep


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    rng: random.Random | None = None,
    *,
    preempt: float = 0.0,
    stagger: float = 0.0,
) -> list[RequestOutput]:
    """Run jobs to their end.

    Args:
        engine: Idle.
        jobs: Requests, in order of arrival.
        rng: Of arrivals and preemptions.
        preempt: Chance, per turn of the loop, to preempt a running sequence.
        stagger: Chance, per turn, that the next request does not arrive yet.

    Returns:
        Final outputs, in the jobs' order.
    """
    rng = rng or random.Random(0)
    left = list(enumerate(jobs))[::-1]
    done: dict[str, RequestOutput] = {}
    for _ in range(20_000):
        while left and rng.random() >= stagger:
            index, job = left.pop()
            request = engine.add_request(f"job-{index}", job.prompt, job.params)
            if job.script is not None:
                engine.worker.scripts[request.sequences[0].seq_id] = job.script
        # The first one is not left to chance: a case with preemption has at least one.
        is_due = rng.random() < preempt or (preempt and not engine.scheduler.num_preemptions)
        if is_due and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        if not left and not engine.has_work():
            break
    else:
        raise AssertionError(f"{len(done)} of {len(jobs)} requests ended in 20000 steps")
    return [done[f"job-{index}"] for index in range(len(jobs))]


def assert_same_bits(job: Job, output: RequestOutput) -> None:
    """Tokens and all logits equal the oracle's."""
    assert job.run is not None
    completion = output.outputs[0]
    assert completion.token_ids == job.run.tokens, (
        f"prompt of {len(job.prompt)} tokens: {completion.token_ids} is not {job.run.tokens}"
    )
    assert completion.logprobs is not None
    logits = job.run.logits.numpy()
    for position, entry in enumerate(completion.logprobs):
        wanted = log_probabilities(logits[position])
        got = np.array([entry[token].logprob for token in range(len(wanted))])
        assert (got == wanted).all(), (
            f"prompt of {len(job.prompt)} tokens, output {position}: "
            f"{int((got != wanted).sum())} of {len(wanted)} logits differ"
        )


def log_probabilities(row: np.ndarray) -> np.ndarray:
    """What the engine reports for logprobs=-1, from raw logits [V]."""
    top = row.max()
    values: np.ndarray = (row - (top + np.log(np.exp(row - top).sum(dtype=np.float64)))).astype(
        np.float64
    )
    return values


def assert_same_outputs(first: RequestOutput, second: RequestOutput) -> None:
    """Two runs gave the same tokens and the same logits, bit for bit."""
    one, two = first.outputs[0], second.outputs[0]
    assert one.token_ids == two.token_ids
    assert one.logprobs is not None
    assert two.logprobs is not None
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        assert {t: e.logprob for t, e in a.items()} == {t: e.logprob for t, e in b.items()}


def assert_checkpoints(engine: Engine, jobs: Sequence[Job]) -> int:
    """Every published state equals a plain sequential pass over the same tokens (O3, O5).

    Returns:
        Published states that were compared.
    """
    wanted: dict[bytes, tuple[dict[str, torch.Tensor], ...]] = {}
    for job in jobs:
        assert job.run is not None
        tokens = job.prompt + job.run.tokens
        keys = chain_keys(root_key(None), tokens, BLOCK)
        wanted.update({keys[n // BLOCK - 1]: s for n, s in job.run.states.items()})
    worker, compared = engine.worker, 0
    groups = engine.parts.model.state_groups(0)
    for group, pool in enumerate(engine.scheduler.state_pools):
        kinds = {spec.name: spec.kind for spec in groups[group].state}
        tensors = {
            name: engine.parts.runtime.read(buffer)
            for name, buffer in worker.pools.states[group].items()
        }
        for key, entry in list(pool._entries.items()):
            assert key in wanted, "a published state belongs to no job's tokens"
            for name, expected in wanted[key][group].items():
                got = tensors[name][:, entry.block]
                if kinds[name] == "window":
                    got = got[:, : expected.shape[1]]
                assert torch.equal(got, expected), f"{name} of block {entry.block} differs"
            compared += 1
    return compared


def assert_balanced(engine: Engine) -> None:
    """O4: an idle engine owns nothing but its cache."""
    scheduler = engine.scheduler
    assert not scheduler.has_work()
    assert not engine._requests
    assert not engine._owner
    scheduler.check()
    scheduler.cache.clear()
    for pool in (scheduler.kv_pool, *scheduler.state_pools):
        assert pool is not None
        assert pool.num_free == pool.num_usable, f"{pool.name} lost blocks"
    assert len(scheduler._free_slots) == scheduler.limits.max_num_seqs


def run_case(
    model: Any,  # noqa: ANN401
    case: Case,
    jobs: Sequence[Job],
    rng: random.Random,
    *,
    draft_model: Any = None,  # noqa: ANN401
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Run one cell of the matrix against the oracle; `engine` is built for the case if not given.

    Returns:
        The engine's figures, with "checkpoints", the number of states compared.
    """
    if engine is None:
        engine = make_engine(model, draft_model=draft_model, **case.options())
    scheduler = engine.scheduler
    scheduler.policy = None  # Propose always: the point is to be right, not fast.
    for job in jobs:
        job.script = None
        if case.drafts.startswith("scripted"):
            job.script = script_for(job, case.num_drafts, rng)
    if case.num_drafts and rng.random() < 0.5:
        scheduler.draft_policy = lambda _: rng.randint(0, case.num_drafts)
    preempt = 0.15 if case.pools == "preempt" else 0.0
    outputs = drive(engine, jobs, rng, preempt=preempt, stagger=0.4)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same_bits(job, output)
    checkpoints = assert_checkpoints(engine, jobs)
    if case.cache == "none":
        assert not checkpoints
    # Again: hits now, for whoever can have them.
    stats = engine.stats()
    for job, output in zip(jobs, drive(engine, jobs, rng, preempt=preempt), strict=True):
        assert_same_bits(job, output)
        assert output.num_cached_tokens + sum(output.missed_tokens.values()) == len(job.prompt)
    hits = engine.stats()["prefix_cache"]["hit_tokens"] - stats["prefix_cache"]["hit_tokens"]
    checkpoints += assert_checkpoints(engine, jobs)
    assert_balanced(engine)
    return {**engine.stats(), "checkpoints": checkpoints, "hits": hits}


def check_family_case(model: Any, jobs: Sequence[Job], case: Case) -> None:  # noqa: ANN401
    """Run one cell on a family's model with fresh events; what it is to exercise must happen."""
    seed = secrets.randbits(32)
    print(f"{case}, events of seed {seed}")
    draft_model = model if case.drafts.startswith("draft") else None
    stats = run_case(model, case, jobs, random.Random(seed), draft_model=draft_model)
    if case.cache == "align":
        assert stats["checkpoints"]
    if case.drafts.startswith(("scripted", "draft")):
        assert stats["accepted_tokens"], "no draft was ever kept, the case shows nothing"
