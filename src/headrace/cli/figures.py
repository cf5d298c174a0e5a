"""Figures of an answer as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headrace.cli.session import Figures


def print_figures(figures: Figures) -> None:
    """Print what an answer took on stderr, so that stdout stays the answer."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _rows(figures):
        table.add_row(name, value)
    Console(stderr=True, highlight=False).print(table)


def _rows(figures: Figures) -> list[tuple[str, str]]:
    missed = ", ".join(f"{count} {reason}" for reason, count in figures.missed_tokens.items())
    rows = [
        ("prompt tokens", str(figures.prompt_tokens)),
        ("of them cached", str(figures.cached_tokens)),
        ("computed because", missed or "-"),
        ("generated tokens", str(figures.completion_tokens)),
        ("time to first token", _seconds(figures.time_to_first_token_s)),
        ("tokens per second", _rate(figures.tokens_per_s)),
        ("steps", str(figures.steps)),
    ]
    if figures.draft_tokens:
        rows.append(("drafts accepted", f"{figures.accepted_tokens} of {figures.draft_tokens}"))
        shares = ", ".join(f"{share:.0%}" for share in figures.acceptance_by_position)
        rows.append(("accepted by position", shares))
    return rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
