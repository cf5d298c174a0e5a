"""One run as a drawing: lanes of host threads and streams, the reported accesses marked."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace import rt
    from headrace.rt.clocks import OpRecord
    from headrace.rt.sim.runtime import SimRuntime

LANE = 34
TICK = 11
MARGIN = 190
CONTEXT = 40
"""Operations drawn before the earlier and after the later access."""

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1b1f24; }
pre { background: #f4f5f7; padding: 1rem; overflow: auto; }
.scroll { overflow: auto; border: 1px solid #d4d8dd; margin-bottom: 1rem; }
text { font: 11px system-ui, sans-serif; fill: #1b1f24; }
.op { fill: #b9cbe4; } .host { fill: #d9d4c5; } .marked { fill: #d6452b; }
.queued { stroke: #b6bcc4; stroke-dasharray: 2 3; } .lane { stroke: #e4e7ea; }
.link { stroke: #d6452b; stroke-width: 1.5; fill: none; }
"""


def write_timeline(path: Path, runtime: SimRuntime, title: str, facts: Sequence[str]) -> None:
    """Write an HTML page that needs nothing else.

    Args:
        path: Where.
        runtime: The run. Its first report is drawn; without one, the first operations are.
        title: Heading.
        facts: Lines below it.
    """
    reports = runtime.reports
    operations = list(runtime.operations)
    marked: list[int] = []
    if reports:
        sides = [side for side in (reports[0].first, reports[0].second) if side is not None]
        marked = [side.sequence for side in sides]
        low, high = min(marked) - CONTEXT, max(marked) + CONTEXT
        operations = [one for one in operations if low <= one.sequence <= high]
    else:
        operations = operations[: 4 * CONTEXT]
    body = [
        f"<h1>{html.escape(title)}</h1>",
        *[f"<p>{html.escape(fact)}</p>" for fact in facts],
        f'<div class="scroll">{_draw(operations, runtime.actors, marked)}</div>',
        "<p>A dashed line leads from the time an operation was enqueued to the time it ran. "
        "Red: the two accesses of the first report.</p>",
        *[_describe(report) for report in reports],
    ]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _describe(report: rt.Report) -> str:
    return f"<pre>{html.escape(str(report))}</pre>"


def _draw(operations: Sequence[OpRecord], actors: Sequence[str], marked: list[int]) -> str:
    used = sorted({one.actor for one in operations})
    lanes = {actor: row for row, actor in enumerate(used)}
    times = sorted({one.enqueued for one in operations} | {one.begun for one in operations})
    # Only times at which something happens take room.
    place = {time: MARGIN + column * TICK for column, time in enumerate(times)}
    width = MARGIN + (len(times) + 2) * TICK
    height = (len(used) + 1) * LANE
    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="timeline">']
    for actor, row in lanes.items():
        y = row * LANE + LANE
        parts.append(f'<line class="lane" x1="{MARGIN}" x2="{width}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="8" y="{y + 4}">{html.escape(actors[actor])}</text>')
    points: list[tuple[int, int]] = []
    for one in operations:
        y = lanes[one.actor] * LANE + LANE
        is_host = actors[one.actor].startswith("host")
        x = place[one.enqueued] if is_host or not one.begun else place[one.begun]
        kind = "marked" if one.sequence in marked else ("host" if is_host else "op")
        label = f"{one.sequence}: {one.name}, step {one.step}"
        if x > place[one.enqueued]:
            start = place[one.enqueued]
            parts.append(f'<line class="queued" x1="{start}" x2="{x}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{y - 9}" width="{TICK - 2}" height="18" rx="2">'
            f"<title>{html.escape(label)}</title></rect>"
        )
        if one.sequence in marked:
            points.append((x, y))
            parts.append(f'<text x="{x}" y="{y - 12}">{html.escape(label)}</text>')
    if len(points) > 1:
        (ax, ay), (bx, by) = points[0], points[-1]
        parts.append(f'<path class="link" d="M{ax} {ay} L{bx} {by}"/>')
    return "".join([*parts, "</svg>"])
