"""Measurements: `headrace bench throughput|latency|serve`, and what they are held against.

    options.py         what can be asked for
    random_weights.py  a model of a given shape, made on the device
    engines.py         an engine as a measurement wants it
    workload.py        prompts and arrival times
    rounds.py          one batch of requests through the engine, with times and counts
    ceilings.py        how fast this device copies and multiplies
    floors.py          the least time the shape's bytes and operations take at those speeds
    measure.py         rounds to rows: decode, prefill, cached prefix, arrivals, process start
    breakdown.py       where a step's time goes, by launch and by kernel; traces
    report.py          rows as JSON and as tables; two runs compared
    plot.py            rows as SVG
    serve.py           the same load against a server over HTTP
    plan.py            what fits on a GPU that need not be here, and how fast it would be
    gpus.json          figures of GPUs, for plan.py
    shares.json        shares of the floor that were measured (tools/measured_shares.py)
    offline.py         the commands without a server

`python -m headrace.bench` needs torch, triton, numpy, tokenizers, safetensors and jinja2 only. This
file and options.py import none of them, so that --help is instant.
"""
