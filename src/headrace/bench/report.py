"""Rows as JSON, as tables and as a plot; two runs side by side."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.bench.plot import draw
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.bench.ceilings import Ceilings
    from headrace.bench.measure import Row

Document = dict[str, Any]
"""A run: command, versions, device, model, settings, ceilings, rows."""

_COLUMNS = (
    ("case", "case", "{}"),
    ("batch", "batch", "{}"),
    ("tok/s", "tokens_per_s", "{:,.0f}"),
    ("floor", "floor_tokens_per_s", "{:,.0f}"),
    ("share", "share_of_floor", "{:.0%}"),
    ("first token s", "time_to_first_token_s", "{:.3f}"),
    ("prefill tok/s", "prefill_tokens_per_s", "{:,.0f}"),
    ("kept/step", "tokens_per_step", "{:.2f}"),
    ("device waits", "device_waits_share", "{:.0%}"),
    ("note", "note", "{}"),
)
_WHAT_IDENTIFIES = ("case", "batch", "request")


def document(
    *,
    model: str,
    device: str,
    settings: dict[str, Any],
    ceilings: Ceilings | None,
    rows: list[Row],
) -> Document:
    """Put a run together.

    Args:
        model: Name or shape file.
        device: As `device_name` says.
        settings: Everything the figures depend on.
        ceilings: The device's, if measured or given.
        rows: Results.
    """
    return {
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "versions": _versions(),
        "device": device,
        "model": model,
        "settings": settings,
        "ceilings": None
        if ceilings is None
        else {
            "copy_tb_s": ceilings.copy_bytes_per_s / 1e12,
            "matmul_tflops": ceilings.matmul_flops_per_s / 1e12,
            "matmul_dtype": ceilings.matmul_dtype,
            "is_measured": ceilings.is_measured,
        },
        "rows": rows,
    }


def device_name(device: str) -> str:
    """Name the device for people."""
    if device == "cuda":
        import torch  # noqa: PLC0415 - a client of a server has none

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine() or "cpu"


def write_document(path: Path, run: Document) -> None:
    """Write a run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def read_document(path: Path) -> Document:
    """Read a run.

    Raises:
        ConfigError: It is none.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(run, dict) or not isinstance(run.get("rows"), list):
        raise ConfigError(f"{path} is no result of headrace bench: it has no rows")
    return run


def table(rows: Sequence[Row]) -> str:
    """Lay rows out as text; columns that no row has are left out."""
    shown = [dict(row, note=_note(row)) for row in rows]
    columns = [
        column for column in _COLUMNS
        if column[1] in ("case", "batch", "tokens_per_s")
        or any(row.get(column[1]) not in (None, "") for row in shown)
    ]  # fmt: skip
    lines = [[title for title, _, _ in columns]]
    lines += [[_cell(row.get(key), form) for _, key, form in columns] for row in shown]
    return lay_out(lines)


def lay_out(lines: list[list[str]]) -> str:
    """Align cells: the first column to the left, notes as they are, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(width) if index == 0 or lines[0][index] == "note" else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def breakdown_text(found: dict[str, Any], most: int = 16) -> str:
    """Lay a breakdown out as text."""
    busy = found["device_busy_share"]
    head = f"{found['steps']} steps profiled, {found['step_ms']:.2f} ms each"
    if busy is not None:
        head += f", device busy {busy:.0%}"
    parts = [head]
    for kind in ("launches", "kernels"):
        lines = [[kind, "ms/step", "calls/step", "share"]]
        lines += [
            [entry["name"][:72], f"{entry['ms_per_step']:.3f}",
             f"{entry['calls_per_step']:.1f}", f"{entry['share']:.1%}"]
            for entry in found[kind][:most]
        ]  # fmt: skip
        parts.append(lay_out(lines))
    return "\n\n".join(parts)


def compare(first: Document, second: Document) -> list[dict[str, Any]]:
    """Pair the rows of two runs that measured the same.

    Returns:
        Per pair: what identifies it, `a` and `b` in tokens per second (or in seconds, where
        there are no tokens per second, with `unit` "s"), and `ratio`, above 1 where b is faster.
    """
    by_key = {_key(row): row for row in second["rows"]}
    pairs = []
    for row in first["rows"]:
        other = by_key.get(_key(row))
        if other is None:
            continue
        unit, field = "tok/s", "tokens_per_s"
        if row.get(field) is None or other.get(field) is None:
            unit, field = "s", "time_to_first_token_s"
        a, b = row.get(field), other.get(field)
        if not a or not b:
            continue
        ratio = b / a if unit == "tok/s" else a / b
        pairs.append({
            **{name: row.get(name) for name in _WHAT_IDENTIFIES},
            "unit": unit, "a": a, "b": b, "ratio": ratio,
        })  # fmt: skip
    return pairs


def comparison_text(first: Document, second: Document) -> str:
    """Lay two runs out side by side, settings that differ first."""
    lines = []
    for name in sorted({*first["settings"], *second["settings"]}):
        a, b = first["settings"].get(name), second["settings"].get(name)
        if a != b:
            lines.append(f"{name}: {_short(a)} | {_short(b)}")
    lines += [
        f"{name}: {_short(first.get(name))} | {_short(second.get(name))}"
        for name in ("device", "model", "versions")
        if first.get(name) != second.get(name)
    ]
    cells = [["case", "batch", "a", "b", "b is faster by"]]
    for pair in compare(first, second):
        form = "{:,.1f} {}" if pair["unit"] == "tok/s" else "{:.4f} {}"
        cells.append([
            str(pair["case"]), str(pair["batch"]), form.format(pair["a"], pair["unit"]),
            form.format(pair["b"], pair["unit"]), f"{pair['ratio']:.3f}x",
        ])  # fmt: skip
    if len(cells) == 1:
        lines.append("the two runs have no measurement in common")
    else:
        lines.append(lay_out(cells))
    return "\n".join(lines)


def show_comparison(paths: tuple[Path, Path], plot: Path | None) -> None:
    """Print two runs side by side, and draw them if asked to.

    Raises:
        ConfigError: A file holds no run.
    """
    first, second = (read_document(path) for path in paths)
    say(comparison_text(first, second))
    if plot is not None:
        labels = [path.stem for path in paths]
        runs = list(zip(labels, (first, second), strict=True))
        _write_plot(plot, draw(runs, f"{labels[0]} and {labels[1]}"))


def finish(run: Document, *, json: Path | None, plot: Path | None) -> None:
    """Print a run's table and write the files that were asked for."""
    say(table(run["rows"]))
    if json is not None:
        write_document(json, run)
    if plot is not None:
        _write_plot(plot, draw([("", run)], f"{run['model']} on {run['device']}"))


def say(text: str) -> None:
    """Print at once, so that a long run can be watched through a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _write_plot(path: Path, svg: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")


def _note(row: Row) -> str:
    if row.get("error"):
        return str(row["error"]).strip().splitlines()[-1][:100]
    if row.get("forced_acceptance"):
        return "FORCED acceptance: speed only, the text is meaningless"
    return str(row.get("note", ""))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(json.dumps(row.get(name), sort_keys=True) for name in _WHAT_IDENTIFIES)


def _cell(value: object, form: str) -> str:
    return "-" if value is None or value == "" else form.format(value)


def _short(value: object) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 - of a line


def _program() -> list[str]:
    name = sys.argv[0] if sys.argv else ""
    if name.endswith(("/headrace", "headrace.exe", "headrace/__main__.py")):
        return ["headrace"]
    if name.endswith(("bench/__main__.py", "bench\\__main__.py")):
        return ["python", "-m", "headrace.bench"]
    return ["python", name]


def _versions() -> dict[str, str]:
    versions = {"headrace": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
