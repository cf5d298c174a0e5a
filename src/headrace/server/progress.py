"""A log line with the engine's figures every few seconds while it works."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.server.engine import ServedEngine

_LOG = logging.getLogger(__name__)


async def log_progress(engine: ServedEngine, *, interval_s: float) -> None:
    """Write a line every interval in which a step was taken, until cancelled.

    Args:
        engine: Whose figures.
        interval_s: Seconds between lines; 0 returns at once.
    """
    if not interval_s:
        return
    before, before_s = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        after, after_s = engine.stats(), time.monotonic()
        if after.get("steps") != before.get("steps"):
            _LOG.info("%s", progress_line(before, after, after_s - before_s))
        before, before_s = after, after_s


def progress_line(before: dict[str, Any], after: dict[str, Any], seconds: float) -> str:
    """The figures of an interval, in the words of vLLM's line, with states and drafts added.

    Args:
        before: `stats()` at its beginning.
        after: `stats()` at its end.
        seconds: Its length.
    """

    def grown(name: str, *, part: str | None = None) -> float:
        old, new = (s.get(part, {}) if part else s for s in (before, after))
        return new.get(name, 0) - old.get(name, 0)

    def rate(name: str) -> float:
        return grown(name) / max(seconds, 1e-9)

    def share(used: float, total: float) -> str:
        return f"{100 * used / total:.1f}%" if total else "-"

    kv = after.get("kv_blocks", {})
    states = after.get("state_blocks", [])
    hits = share(
        grown("hit_tokens", part="prefix_cache"), grown("query_tokens", part="prefix_cache")
    )
    fullest: dict[str, int] = max(
        states, key=lambda pool: pool["used"] / max(1, pool["total"]), default={}
    )
    return (
        f"Avg prompt throughput: {rate('computed_prompt_tokens'):.1f} tokens/s, "
        f"Avg generation throughput: {rate('generated_tokens'):.1f} tokens/s, "
        f"Running: {after.get('running', 0)} reqs, Waiting: {after.get('waiting', 0)} reqs, "
        f"KV cache usage: {share(kv.get('used', 0), kv.get('total', 0))}, "
        f"State usage: {share(fullest.get('used', 0), fullest.get('total', 0))}, "
        f"Prefix cache hit rate: {hits}, "
        f"Draft acceptance: {share(grown('accepted_tokens'), grown('draft_tokens'))}"
    )
