"""`headrace top`: a server's figures in the terminal."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headrace.cli.http import DEFAULT_URL, ask_server
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_BAR_CHARS = 30
_MAX_INTERVAL_S = 86_400


def top(
    url: str = DEFAULT_URL,
    /,
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    interval: float = 1.0,
    api_key: str | None = None,
) -> int:
    """Show what a server is doing, again every second, until Ctrl-C.

    Args:
        url: The server's address.
        once: Print the figures of one interval and end.
        interval: Seconds between two looks.
        api_key: A key, if the server wants one.
    """
    if not 0 <= interval <= _MAX_INTERVAL_S:
        raise ConfigError(f"--interval is {interval:g} but must be in [0, {_MAX_INTERVAL_S}]")
    # Takes a moment, which `headrace --help` need not.
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    def look() -> tuple[dict[str, Any], float]:
        return ask_server(url, "/stats", api_key=api_key), time.monotonic()

    before, before_s = look()
    time.sleep(interval)
    after, after_s = look()
    console = Console(highlight=False)
    if once:
        console.print(screen(before, after, after_s - before_s))
        return 0
    with Live(
        screen(before, after, after_s - before_s), console=console, screen=console.is_terminal,
        auto_refresh=False,
    ) as live:
        while True:
            time.sleep(interval)
            before, before_s = after, after_s
            after, after_s = look()
            live.update(screen(before, after, after_s - before_s), refresh=True)


def screen(before: dict[str, Any], after: dict[str, Any], seconds: float) -> "Group":
    """What is shown of an interval.

    Args:
        before: `/stats` at its beginning.
        after: `/stats` at its end.
        seconds: Its length.
    """
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    title = Text(f"headrace {after.get('version', '')}  {after.get('model', '')}", style="bold")
    return Group(
        title, Text(), _table(_work(before, after, seconds)), Text(), _table(_memory(after)),
        Text(), _table(_cache(before, after)),
    )


def _table(rows: list[tuple[str, str]]) -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", min_width=22)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _work(
    before: dict[str, Any], after: dict[str, Any], seconds: float
) -> list[tuple[str, str]]:
    def grown(name: str) -> float:
        return float(after.get(name, 0)) - float(before.get(name, 0))

    steps = grown("steps")
    shares = after.get("acceptance_by_position") or []
    return [
        ("sequences", f"{after.get('running', 0)} running, {after.get('waiting', 0)} waiting"),
        ("generated", f"{grown('generated_tokens') / seconds:,.1f} tokens/s"),
        ("prompts computed", f"{grown('computed_prompt_tokens') / seconds:,.1f} tokens/s"),
        ("steps", f"{steps / seconds:,.1f} /s, "
                  f"{grown('forward_tokens') / steps if steps else 0:,.1f} tokens each"),
        ("host waits", f"{grown('host_waits') / steps if steps else 0:.2f} a step"),
        ("drafts kept", _percent(grown("accepted_tokens"), grown("draft_tokens"))),
        ("  by position, ever", " ".join(f"{share:.0%}" for share in shares) or "-"),
        ("preemptions, ever", f"{after.get('preemptions', 0):,}"),
    ]


def _memory(stats: dict[str, Any]) -> list[tuple[str, str]]:
    pools = [("KV blocks", stats.get("kv_blocks") or {})]
    pools += [
        (f"state blocks, group {group}", pool)
        for group, pool in enumerate(stats.get("state_blocks") or [])
    ]
    return [(name, _bar(pool)) for name, pool in pools]


def _cache(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    old, new = before.get("prefix_cache") or {}, after.get("prefix_cache") or {}
    hits, asked = (new.get(k, 0) - old.get(k, 0) for k in ("hit_tokens", "query_tokens"))
    rows = [
        ("prefix hits", _percent(hits, asked)),
        ("  ever", _percent(new.get("hit_tokens", 0), new.get("query_tokens", 0))),
    ]
    missed = sorted((new.get("missed_tokens") or {}).items(), key=lambda one: -one[1])
    return rows + [(f"  missed: {reason}", f"{count:,}") for reason, count in missed if count]


def _bar(pool: dict[str, Any]) -> str:
    total = pool.get("total", 0)
    if not total:
        return "-"
    used, cached = pool.get("used", 0), pool.get("cached", 0)
    full = round(_BAR_CHARS * used / total)
    kept = min(_BAR_CHARS - full, round(_BAR_CHARS * cached / total))
    bar = "█" * full + "▒" * kept + "░" * (_BAR_CHARS - full - kept)
    return f"{bar} {used:,} used, {cached:,} cached of {total:,}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
