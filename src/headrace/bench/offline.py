"""`bench throughput` and `bench latency`: an engine in this process, no server."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.bench.breakdown import profile_decode
from headrace.bench.ceilings import Ceilings, measure_ceilings
from headrace.bench.engines import Load, device_of, open_engine, shape_model, sized
from headrace.bench.measure import Bench, Case
from headrace.bench.options import as_json
from headrace.bench.report import Document, breakdown_text, device_name, document, say
from headrace.bench.start import cold_start

if TYPE_CHECKING:
    from headrace.bench.measure import Row
    from headrace.bench.options import OfflineOptions
    from headrace.config import EngineConfig

_REQUESTS_PER_BATCH = 4
_PROFILE_BATCH_TOKENS = 8


def throughput(config: EngineConfig, options: OfflineOptions) -> Document:
    """Measure tokens per second: decoding and prefill of full batches, or an open load."""
    return _run(config, options, "throughput")


def latency(config: EngineConfig, options: OfflineOptions) -> Document:
    """Measure times: first token, between tokens, whole requests; every token is timed."""
    return _run(config, options, "latency")


def _run(config: EngineConfig, options: OfflineOptions, command: str) -> Document:
    rows: list[Row] = []
    if options.cold_start:
        # First: the child needs the device's memory.
        rows.append(
            cold_start(config, shape=options.random_weights, prompt_tokens=options.prompt_tokens)
        )
    device = device_of(config)
    cases = [_case(options, batch, command) for batch in options.batches]
    load = Load(
        max_batch=max(case.batch for case in cases),
        max_requests=max(case.requests or case.batch for case in cases),
        max_tokens=max(case.max_tokens for case in cases)
        + options.breakdown * _PROFILE_BATCH_TOKENS,
    )
    # Before the engine: each runtime makes its own streams current on this thread.
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    ceilings = _ceilings(device, dtype, options)
    model = None
    if options.random_weights is not None:
        model = shape_model(sized(config, load), options.random_weights)
    engine = open_engine(
        sized(config, load),
        model=model,
        shares=options.shares,
        adaptive_drafts=options.adaptive_drafts,
    )
    bench = Bench(engine, ceilings=ceilings, seed=config.seed, shares=options.shares)
    if options.shares:
        say(
            "FORCED acceptance: drafts are kept by lot, whatever the model says. Speed is that of "
            f"acceptance {options.forced_acceptance}; the text is meaningless."
        )
    for case in cases:
        is_open = case.is_streamed or case.requests is not None
        rows.append(bench.paced(case) if is_open else bench.decode(case))
        if options.breakdown or options.trace is not None:
            found = profile_decode(
                engine,
                bench.prompts(case, []),
                options.breakdown or _PROFILE_BATCH_TOKENS,
                temperature=options.temperature,
                trace=options.trace if case is cases[-1] else None,
            )
            rows[-1]["breakdown"] = found
            say(f"batch {case.batch}: {breakdown_text(found)}\n")
    settings: dict[str, Any] = {
        "bench": command, **as_json(options), "engine": asdict(engine.config)
    }
    shape = options.random_weights
    return document(
        model=config.model if shape is None else f"{shape.stem} (random weights)",
        device=device_name(device),
        settings=settings,
        ceilings=ceilings,
        rows=rows,
    )


def _case(options: OfflineOptions, batch: int, command: str) -> Case:
    is_open = options.arrival_rate is not None or options.concurrency is not None
    requests = options.requests
    if is_open and requests is None:
        requests = _REQUESTS_PER_BATCH * batch
    name = {"throughput": "decode", "latency": "latency"}[command]
    if options.arrival_rate is not None:
        name = f"{options.arrival_rate:g} requests/s"
    elif options.concurrency is not None:
        name = f"at most {options.concurrency} at once"
    if options.shared_prefix:
        name += f", {options.shared_prefix} shared"
    return Case(
        name=name,
        batch=batch,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        shared_prefix=options.shared_prefix,
        repeats=options.repeats,
        warmup_tokens=options.warmup_tokens,
        temperature=options.temperature,
        requests=requests,
        arrival_rate=options.arrival_rate,
        concurrency=options.concurrency,
        is_streamed=command == "latency",
    )


def _ceilings(device: str, dtype: str, options: OfflineOptions) -> Ceilings:
    given = (options.copy_tb_s, options.matmul_tflops)
    if given[0] is not None and given[1] is not None:
        return Ceilings(
            copy_bytes_per_s=given[0] * 1e12, matmul_flops_per_s=given[1] * 1e12,
            matmul_dtype=dtype, is_measured=False,
        )  # fmt: skip
    found = measure_ceilings(device, dtype)
    return Ceilings(
        copy_bytes_per_s=found.copy_bytes_per_s if given[0] is None else given[0] * 1e12,
        matmul_flops_per_s=found.matmul_flops_per_s if given[1] is None else given[1] * 1e12,
        matmul_dtype=dtype,
    )
