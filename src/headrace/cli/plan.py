"""`headrace plan`: what would fit on GPUs that need not be here, and how fast it would be."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import orjson
from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.options import parse_shares
from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config
from headrace.cli.inspect import readable_bytes

if TYPE_CHECKING:
    from headrace.bench.plan import Plan

_MACHINE = Group("Machine", sort_key=5)


def plan(
    model: str | None = None,
    /,
    *,
    gpu: Annotated[str, Parameter(group=_MACHINE)] = "h200",
    gpus: Annotated[int, Parameter(group=_MACHINE)] = 1,
    context: Annotated[int, Parameter(group=_MACHINE)] = 1024,
    acceptance: Annotated[str, Parameter(group=_MACHINE)] = "",
    json: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Predict what fits on a GPU and how fast it decodes; needs no GPU and loads no weights.

    Args:
        model: Same as --model; a config.json by itself will do.
        gpu: h200, h100, a100, or a JSON file with memory_gib, copy_tb_s and matmul_tflops.
        gpus: How many; each runs a whole copy of the model.
        context: Tokens before each decoding row, in the mean.
        acceptance: With --speculative, the share of rows that keep each draft, as 0.8,0.64,0.512.
        json: Print one JSON object.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    # Imports torch.
    from headrace.bench.plan import find_gpu, make_plan  # noqa: PLC0415

    found = make_plan(
        engine_config(engine, positional_model=model),
        find_gpu(gpu),
        gpus=gpus,
        context=context,
        acceptance=parse_shares(acceptance, name="acceptance"),
    )
    if json:
        print(orjson.dumps(dataclasses.asdict(found), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found)
    return 0 if found.obstacle is None else 1


def _print(plan: "Plan") -> None:
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("model", f"{plan.model} ({plan.architecture}), {plan.dtype}")
    table.add_row(
        "GPU", f"{plan.gpus} x {plan.gpu.name}: {plan.gpu.memory_gib:g} GiB, "
        f"{plan.gpu.copy_tb_s:g} TB/s, {plan.gpu.matmul_tflops:g} TFLOP/s"
    )  # fmt: skip
    table.add_row("weights", readable_bytes(plan.weight_bytes))
    table.add_row("KV per token", readable_bytes(plan.kv_bytes_per_token))
    table.add_row(
        "prompts", f"floor {plan.prefill_floor_tokens_per_s:,.0f} tokens/s "
        f"at {plan.context_tokens:,} tokens"
    )  # fmt: skip
    for state in plan.states:
        table.add_row(
            f"{state.state_dtype} states",
            f"{readable_bytes(state.state_bytes_per_sequence)} a sequence ({state.state_scheme})",
        )
        for fit in state.fits:
            table.add_row(
                f"  at {fit.context_tokens:,} tokens", f"{fit.sequences:,} sequences at once"
            )
    console.print(table)
    if plan.obstacle is not None:
        console.print(Text(f"does not fit: {plan.obstacle}"))
    else:
        console.print(_speeds(plan))
    for note in plan.notes:
        # Text: a path is no markup.
        console.print(Text(note), style="dim")


def _speeds(plan: "Plan") -> Table:
    per = "each GPU" if plan.gpus > 1 else "one GPU"
    title = f"decoding at {plan.context_tokens:,} tokens, tokens/s of {per}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("batch", justify="right")
    for state in plan.states:
        table.add_column(f"{state.state_dtype}: floor", justify="right")
        table.add_column("prediction", justify="right")
    if plan.gpus > 1:
        table.add_column(f"all {plan.gpus}, {plan.states[-1].state_dtype}", justify="right")
    for speeds in zip(*(state.decode for state in plan.states), strict=True):
        cells = [str(speeds[0].batch)]
        for speed in speeds:
            predicted = speed.predicted_tokens_per_s
            if not speed.fits:
                cells += ["does not fit", "-"]
            else:
                cells += [f"{speed.floor_tokens_per_s:,.0f}", _figure(predicted)]
        if plan.gpus > 1:
            last = speeds[-1]
            one = last.predicted_tokens_per_s if last.fits else None
            cells.append(_figure(None if one is None else plan.gpus * one))
        table.add_row(*cells)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
