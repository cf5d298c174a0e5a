"""The speed table of one GPU, in one command, with floors and shares.

    python benchmarks/h200_table.py --json benchmarks/results/h200.json [--quick] [--only TEXT]

Rows: plain decode, decode with forced acceptance, float32 state, prefill, a cached prefix, process
start to first token, other shapes, long contexts. Decode tok/s = batch * (n - 1) / (t(n tokens) -
t(1 token)), median after a warm-up, fresh random prompts each time, prefix cache and asynchronous
scheduling on. Random weights: speed only.

Each row is written to the JSON as soon as it is there; a row that fails says why and the next one
is measured. Needs torch, triton, numpy, tokenizers, safetensors and jinja2; the package need not be
installed. `--dry-run` goes through every row at tiny sizes, on a CPU if need be.
"""

# The package need not be installed, so its path comes before its import.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "src"))

from headrace.bench.breakdown import profile_decode
from headrace.bench.ceilings import Ceilings, measure_ceilings
from headrace.bench.engines import Load, device_of, open_engine, shape_model, sized
from headrace.bench.measure import Bench, Case
from headrace.bench.random_weights import release_memory
from headrace.bench.report import (
    breakdown_text,
    device_name,
    document,
    lay_out,
    say,
    write_document,
)  # fmt: skip
from headrace.bench.start import cold_start
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.bench.measure import Row

SHAPES = _ROOT / "benchmarks" / "shapes"
MAIN_SHAPE = "qwen3.5-4b-text"
SHARES = (0.8, 0.64, 0.512)
QUICK_SECONDS = 170.0
PROFILED_STEPS = 8
LARGEST_BATCH = 256
LONGEST_START_S = 300.0
LONGEST_QUICK_START_S = 50.0
MOST_WAITS = 0.05
GROUP_SLACK = 1.6
TINY = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 320,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "num_experts": 0, "max_position_embeddings": 262144,
    "tie_word_embeddings": True, "full_attention_interval": 2, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.25, "dtype": "bfloat16", "eos_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table.

    Attributes:
        case: What is measured.
        kind: decode or prefill.
        peer, required, aim: In tok/s, or in seconds for cached prefixes.
        is_seconds: The figure is the time of the whole case.
    """

    case: Case
    kind: str = "decode"
    peer: float | None = None
    required: float | None = None
    aim: float | None = None
    is_seconds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows measured on one engine.

    Attributes:
        name: For --only.
        shape: File name without ending.
        lines: Its rows.
        state_dtype: Of recurrent states.
        drafts: MTP drafts, all with forced acceptance; 0 for plain decoding.
        profile_batches: Batches whose steps are profiled after the rows.
        changes: Further settings.
    """

    name: str
    shape: str
    lines: tuple[Line, ...]
    state_dtype: Any = "bfloat16"
    drafts: int = 0
    profile_batches: tuple[int, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


def decode(
    name: str, batch: int, targets: tuple[float, ...] = (), **changes: Any  # noqa: ANN401 - of Case
) -> Line:
    """Make a decode row: 128 tokens in, 257 out; targets are peer, required, aim."""
    case = Case(name=name, batch=batch, prompt_tokens=128, output_tokens=257)
    given = dict(zip(("peer", "required", "aim"), targets, strict=False))
    return Line(case=replace(case, **changes), **given)


def groups() -> list[Group]:
    """List every row, the most wanted first."""
    plain = {
        1: (274, 340, 430), 8: (2053, 2700, 3400), 32: (5781, 8800, 11000),
        128: (12399, 20000, 26000), 256: (16349, 25000, 32000),
    }  # fmt: skip
    forced = {
        1: (508, 650, 800), 32: (10532, 15000, 22000), 128: (19683, 27000, 34000),
        256: (19662, 30000, 38000),
    }  # fmt: skip
    prefill = Line(
        case=Case(name="prefill", batch=32, prompt_tokens=4096, output_tokens=1),
        kind="prefill", peer=61900, required=62000, aim=72000,
    )  # fmt: skip
    cached = Line(
        case=Case(
            name="cached prefix", batch=32, prompt_tokens=128, output_tokens=1,
            shared_prefix=16384,
        ),
        kind="prefill", peer=0.31, required=0.25, aim=0.12, is_seconds=True,
    )  # fmt: skip
    long = decode("64k context", 8, prompt_tokens=65536, output_tokens=65, repeats=1)
    other = [
        Group(
            name=f"shape {size}", shape=f"qwen3.5-{size.lower()}-text",
            lines=tuple(decode(f"plain decode, {size}", b, repeats=1) for b in (1, 32, 256)),
        )
        for size in ("0.8B", "9B", "35B-A3B")
    ]  # fmt: skip
    return [
        Group(
            name="plain", shape=MAIN_SHAPE, profile_batches=(1, 256),
            lines=tuple(decode("plain decode", b, plain[b]) for b in (256, 1, 32, 8, 128)),
        ),
        Group(
            name="forced", shape=MAIN_SHAPE, drafts=3, profile_batches=(1, 256),
            lines=tuple(decode("3 drafts, forced", b, forced[b]) for b in (256, 1, 32, 128)),
        ),
        Group(name="prefill", shape=MAIN_SHAPE, lines=(prefill,)),
        Group(name="cached", shape=MAIN_SHAPE, lines=(cached,)),
        Group(
            name="graphs off", shape=MAIN_SHAPE, profile_batches=(1,), changes={"graphs": "off"},
            lines=tuple(decode("plain decode, graphs off", b) for b in (256, 1, 32)),
        ),
        Group(
            name="graphs off, drafts", shape=MAIN_SHAPE, drafts=3, changes={"graphs": "off"},
            lines=tuple(decode("3 drafts, forced, graphs off", b) for b in (256, 1, 32)),
        ),
        Group(
            name="float32", shape=MAIN_SHAPE, state_dtype="float32",
            lines=tuple(decode("plain decode, float32 state", b) for b in (256, 32, 1, 8, 128)),
        ),
        Group(
            name="float32 forced", shape=MAIN_SHAPE, state_dtype="float32", drafts=3,
            lines=tuple(decode("3 drafts, forced, float32 state", b) for b in (256, 1)),
        ),
        Group(
            name="columns", shape=MAIN_SHAPE, changes={"state_scheme": "columns"},
            lines=(decode("plain decode, columns", 256),),
        ),
        Group(name="long", shape=MAIN_SHAPE, lines=(long,)),
        *other,
    ]  # fmt: skip


def quick(group: Group) -> Group:
    """Cut a group down: fewer tokens, one run, the batches that say most."""
    wanted = {
        "plain": (256, 1, 32), "forced": (256, 1, 32), "prefill": (32,), "cached": (32,),
        "graphs off": (256, 1, 32), "graphs off, drafts": (256, 1, 32),
    }.get(group.name, ())  # fmt: skip
    lines = [line for line in group.lines if line.case.batch in wanted]
    return replace(
        group,
        lines=tuple(
            replace(
                line,
                case=replace(
                    line.case,
                    output_tokens=min(65, line.case.output_tokens),
                    repeats=1,
                    warmup_tokens=min(17, line.case.output_tokens),
                ),
            )
            for line in lines
        ),
        profile_batches=group.profile_batches[-1:],
    )


def tiny(group: Group) -> Group:
    """Shrink a group to sizes that a CPU does in a moment; for trying the script out."""
    lines = []
    for line in group.lines[:2]:
        case = replace(
            line.case,
            batch=min(2, line.case.batch),
            prompt_tokens=min(20, line.case.prompt_tokens),
            output_tokens=min(6, line.case.output_tokens),
            shared_prefix=min(64, line.case.shared_prefix),
            repeats=1,
            warmup_tokens=min(2, line.case.output_tokens),
        )
        lines.append(replace(line, case=case, required=1.0))
    batches = tuple(min(2, batch) for batch in group.profile_batches[:1])
    return replace(group, lines=tuple(lines), profile_batches=batches)


class Table:
    """Measures groups and keeps what came of them.

    Args:
        given: The script's options.
        shapes: Folder of the shapes.
    """

    def __init__(self, given: argparse.Namespace, shapes: Path) -> None:
        self._given = given
        self._shapes = shapes
        self._end_s = time.perf_counter() + given.seconds
        self._device = device_of(EngineConfig(device=given.device))
        self._group_end_s = self._end_s
        self._ceilings: Ceilings | None = None
        self.rows: list[Row] = []
        self._profiles: list[dict[str, Any]] = []

    def run(self, chosen: list[Group], *, with_start: bool) -> None:
        """Measure everything that there is time for."""
        if with_start:
            # First: the child needs the device's memory.
            self._start(chosen[0].shape if chosen else MAIN_SHAPE)
        self._measure_ceilings()
        for number, group in enumerate(chosen):
            left = self._end_s - time.perf_counter()
            # One slow group must not take the time of all that follow.
            share_s = left / (len(chosen) - number) * GROUP_SLACK
            self._group_end_s = time.perf_counter() + min(left, share_s)
            if time.perf_counter() > self._end_s:
                self._keep({"case": group.name, "batch": 0, "error": "no time was left"})
                continue
            begin = time.perf_counter()
            try:
                self._group(group)
            except Exception as error:
                self._failed(group.name, 0, error)
            say(f"({group.name}: {time.perf_counter() - begin:.0f} s)")
        self.save()

    def save(self) -> None:
        """Write what there is."""
        if self._given.json is None:
            return
        run = document(
            model=MAIN_SHAPE, device=device_name(self._device), ceilings=self._ceilings,
            rows=self.rows,
            settings={"bench": "h200_table", "quick": self._given.quick,
                      "dry_run": self._given.dry_run, "only": self._given.only},
        )  # fmt: skip
        write_document(self._given.json, run | {"profiles": self._profiles})

    def text(self) -> str:
        """Lay the table out."""
        cells = [["case", "batch", "measured", "unit", "floor", "share", "peer", "required",
                  "aim", "verdict", "kept/step", "device waits", "note"]]  # fmt: skip
        for row in self.rows:
            unit = row.get("unit", "tok/s")
            figures = [row.get(name) for name in ("measured", "floor", "peer", "required", "aim")]
            shown = [_figure(value, unit) for value in figures]
            cells.append([
                str(row["case"]), str(row["batch"]), shown[0], unit, shown[1],
                _percent(row.get("share_of_floor")), *shown[2:], row.get("verdict", "-"),
                f"{row['tokens_per_step']:.2f}" if row.get("tokens_per_step") else "-",
                _percent(row.get("device_waits_share")), _note(row),
            ])  # fmt: skip
        return "\n".join([lay_out(cells), *self._waits()])

    def _waits(self) -> list[str]:
        """Say how often the device waited in the largest batches."""
        return [
            f"{row['case']}, batch {row['batch']}: the device waited for the host before "
            f"{_percent(row['device_waits_share'])} of the steps (required: at most "
            f"{MOST_WAITS:.0%})"
            for row in self.rows
            if row["batch"] == LARGEST_BATCH and row.get("device_waits_share") is not None
        ]

    def _measure_ceilings(self) -> None:
        sizes = {"copy_bytes": 2**20, "matmul_size": 64} if self._given.dry_run else {}
        try:
            self._ceilings = measure_ceilings(self._device, "bfloat16", **sizes)
        except Exception as error:
            self._failed("ceilings", 0, error)
            return
        say(
            f"{device_name(self._device)}: copy {self._ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"bfloat16 product {self._ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
        )

    def _start(self, shape: str) -> None:
        longest = LONGEST_QUICK_START_S if self._given.quick else LONGEST_START_S
        left = min(longest, self._end_s - time.perf_counter())
        try:
            row = cold_start(
                EngineConfig(device=self._given.device, state_dtype="bfloat16"),
                shape=self._shapes / f"{shape}.json", prompt_tokens=128, timeout_s=left,
            )  # fmt: skip
        except Exception as error:
            self._failed("process start to first token", 1, error)
            return
        _judge(row, row["time_to_first_token_s"], Line(
            case=Case(name="", batch=1, prompt_tokens=128, output_tokens=1),
            peer=160.0, required=40.0, aim=12.0, is_seconds=True,
        ))  # fmt: skip
        self._keep(row)

    def _group(self, group: Group) -> None:
        config = EngineConfig(
            device=self._given.device,
            dtype="bfloat16",
            state_dtype=group.state_dtype,
            speculative=f"mtp:{group.drafts}" if group.drafts else "none",
            **group.changes,
        )
        longest = max(line.case.max_tokens for line in group.lines)
        profiled = max(
            line.case.prompt_tokens for line in group.lines
        ) + (PROFILED_STEPS + 16) * (1 + group.drafts)
        batch = max(line.case.batch for line in group.lines)
        load = Load(max_batch=batch, max_requests=batch, max_tokens=max(longest, profiled))
        config = sized(config, load)
        model = shape_model(config, self._shapes / f"{group.shape}.json")
        shares = SHARES[: group.drafts]
        engine = open_engine(config, model=model, shares=shares)
        bench = Bench(
            engine, ceilings=self._ceilings, seed=config.seed, shares=shares,
            deadline_s=self._group_end_s,
        )  # fmt: skip
        for line in group.lines:
            try:
                self._line(bench, group, line)
            except Exception as error:
                self._failed(line.case.name, line.case.batch, error)
                if "out of memory" not in str(error).lower():
                    # Requests of the failed row may be left in the engine.
                    break
        for batch in group.profile_batches:
            if time.perf_counter() < self._end_s:
                self._profile(bench, group, batch)
        del bench, engine, model
        release_memory()

    def _line(self, bench: Bench, group: Group, line: Line) -> None:
        measure = bench.decode if line.kind == "decode" else bench.prefill
        row = measure(line.case)
        row |= {
            "group": group.name, "shape": group.shape, "state_dtype": group.state_dtype,
            "engine": asdict(bench.engine.config),
        }  # fmt: skip
        measured = row.get("seconds") if line.is_seconds else row.get("tokens_per_s")
        _judge(row, measured, line)
        self._keep(row)

    def _profile(self, bench: Bench, group: Group, batch: int) -> None:
        case = next((line.case for line in group.lines if line.case.batch == batch), None)
        if case is None:
            return
        trace = None
        if self._given.traces is not None:
            self._given.traces.mkdir(parents=True, exist_ok=True)
            trace = self._given.traces / f"{group.name}-{batch}.json".replace(" ", "-")
        try:
            found = profile_decode(
                bench.engine, bench.prompts(case, []), PROFILED_STEPS, trace=trace
            )
        except Exception as error:
            self._failed(f"profile of {group.name}", batch, error)
            return
        self._profiles.append({"group": group.name, "batch": batch, **found})
        self.save()
        say(f"\n{group.name}, batch {batch}: {breakdown_text(found)}\n")

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self.save()
        unit = row.get("unit", "tok/s")
        say(
            f"{row['case']}, batch {row['batch']}: {_figure(row.get('measured'), unit)} {unit}, "
            f"floor {_figure(row.get('floor'), unit)}, share {_percent(row.get('share_of_floor'))}"
            f" {_note(row)}"
        )

    def _failed(self, name: str, batch: int, error: Exception) -> None:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
        self._keep({"case": name, "batch": batch, "error": text})
        # The traceback holds the engine's frames, and with them its memory.
        error.__traceback__ = None
        release_memory()


def _judge(row: Row, measured: float | None, line: Line) -> None:
    """Put the figure that counts and what it is held against into a row."""
    row["unit"] = "s" if line.is_seconds else "tok/s"
    row["measured"] = measured
    row["floor"] = row.get("floor_s") if line.is_seconds else row.get("floor_tokens_per_s")
    row["peer"], row["required"], row["aim"] = line.peer, line.required, line.aim
    if line.is_seconds and measured and row["floor"]:
        row["share_of_floor"] = row["floor"] / measured
    if measured is None or line.required is None:
        return
    sign = -1.0 if line.is_seconds else 1.0
    row["verdict"] = "missed"
    for name in ("required", "aim"):
        target = row[name]
        if target is not None and sign * measured >= sign * target:
            row["verdict"] = name


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if unit == "s" else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _note(row: Row) -> str:
    if row.get("error"):
        return str(row["error"]).strip().splitlines()[-1][:120]
    return "FORCED acceptance" if row.get("forced_acceptance") else ""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns 1 if nothing could be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--traces", type=Path, help="folder for traces that Perfetto opens")
    parser.add_argument("--quick", action="store_true", help="the main rows in about 3 minutes")
    parser.add_argument("--dry-run", action="store_true", help="every row at tiny sizes")
    parser.add_argument("--only", default="", help="groups whose name has one of these, by commas")
    parser.add_argument("--seconds", type=float, help="start nothing new after these")
    parser.add_argument("--no-start", action="store_true", help="leave the new process out")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(arguments)
    if given.seconds is None:
        given.seconds = QUICK_SECONDS if given.quick else 24 * 3600.0
    chosen = groups()
    wanted = [part.strip() for part in given.only.split(",") if part.strip()]
    if wanted:
        chosen = [group for group in chosen if any(part in group.name for part in wanted)]
    if given.quick:
        chosen = [group for group in map(quick, chosen) if group.lines]
    with tempfile.TemporaryDirectory() as folder:
        shapes = SHAPES
        if given.dry_run:
            chosen = [tiny(group) for group in chosen]
            shapes = Path(folder)
            for name in {MAIN_SHAPE, *(group.shape for group in chosen)}:
                (shapes / f"{name}.json").write_text(json.dumps(TINY), encoding="utf-8")
        run = Table(given, shapes)
        run.run(chosen, with_start=not given.no_start and (not wanted or "start" in wanted))
    say("\n" + run.text())
    failed = [row for row in run.rows if row.get("error")]
    return 1 if failed and len(failed) == len(run.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
