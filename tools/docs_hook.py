"""Fill in what the documentation site takes from the code. MkDocs calls the `on_` functions.

A page says `<!-- generated: NAME -->` where the text of `GENERATED[NAME]` belongs. The table of
other engines' flags stands in its page, where it is read without the site too:

    python tools/docs_hook.py    # write it again
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from prometheus_client.parser import text_string_to_metric_families

from headrace.cli.aliases import (
    GRAMMAR_BACKENDS,
    SAME_VALUE,
    SPECULATIVE,
    SWITCHES,
    WITHOUT_EFFECT,
)
from headrace.cli.flags import documented_args
from headrace.cli.main import build_app
from headrace.config import EngineConfig
from headrace.sampling_params import SamplingParams
from headrace.server.metrics import Metrics

DOCS = Path(__file__).parents[1] / "docs"
MOVING = DOCS / "guide" / "moving.md"
_ALIASES = "<!-- aliases:begin -->\n", "<!-- aliases:end -->\n"
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*)([^)#:]+)\)")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def aliases() -> str:
    """Other engines' flags and what they are here."""
    rows = [(f"`{name}`", f"`{native}`") for name, native in SAME_VALUE.items()]
    rows += [
        (f"`{name}`", f"`{flag}`" if value is None else f"`{flag} {value}`")
        for name, (flag, value) in SWITCHES.items()
    ]
    rows.append((f"`{SPECULATIVE} JSON`, or `{SPECULATIVE}.KEY`", "`--speculative METHOD:K`"))
    rows += [
        (f"`{name}`", "`--grammar-backend auto`, `llguidance` or `xgrammar`")
        for name in GRAMMAR_BACKENDS
    ]
    rows += [(f"`{name}`", f"accepted: {why}") for name, why in WITHOUT_EFFECT.items()]
    return _table(("there", "here"), rows)


def cli() -> str:
    """Every command and flag."""
    app = build_app()
    text: str = app.generate_docs(output_format="markdown", heading_level=2, recursive=True)
    # The site has a table of contents of its own.
    return re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", text, flags=re.DOTALL)


def _fields(kind: type) -> str:
    hints, help_of = get_type_hints(kind), documented_args(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = field.default
        shown = "" if default in {None, dataclasses.MISSING, ()} else f"`{default}`"
        hint = hints[field.name]
        values = hint.__name__ if isinstance(hint, type) else re.sub(r"\w+\.", "", str(hint))
        rows.append((f"`{field.name}`", f"`{values}`", shown, help_of.get(field.name, "")))
    return _table(("name", "values", "default", "meaning"), rows)


def settings() -> str:
    """The engine's settings."""
    return _fields(EngineConfig)


def sampling() -> str:
    """The sampling parameters."""
    return _fields(SamplingParams)


def metrics() -> str:
    """Every metric of a server that has just started."""
    pool = {"total": 1, "used": 0, "free": 1, "cached": 0, "pinned": 0, "evictions": 0}
    stats = {
        "kv_blocks": pool, "state_blocks": [pool], "drafted_by_position": [0],
        "accepted_by_position": [0], "acceptance_by_position": [0.0],
        "prefix_cache": {"query_tokens": 0, "hit_tokens": 0, "missed_tokens": {"last_token": 0}},
        "step_tokens": {"limits": (1,), "counts": [0, 0], "sum": 0},
    }
    engine: Any = SimpleNamespace(
        model_name="nano", config=EngineConfig(model="nano"), stats=lambda: stats
    )
    own = Metrics(engine)
    own.refused(503)
    own.answered("/v1/completions", "POST", 200, 0.0)
    rows = []
    for family in text_string_to_metric_families(own.exposition().decode()):
        labels = {name for sample in family.samples for name in sample.labels}
        more = ", ".join(f"`{name}`" for name in sorted(labels - {"model_name", "engine", "le"}))
        rows.append((f"`{family.name}`", family.type, more, family.documentation))
    return _table(("name", "type", "further labels", "meaning"), rows)


def decisions() -> str:
    """The titles of the decisions, as links."""
    pages = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages]
    return "\n".join(
        f"- [{title}]({page.name})" for page, title in zip(pages, titles, strict=True)
    )


GENERATED = {make.__name__: make for make in (cli, settings, sampling, metrics, decisions)}


def with_aliases(page: str) -> str:
    """A page with the table of other engines' flags as it should be."""
    before, begin, rest = page.partition(_ALIASES[0])
    _, end, after = rest.partition(_ALIASES[1])
    assert begin, f"the page lacks {_ALIASES[0]!r}"
    assert end, f"the page lacks {_ALIASES[1]!r}"
    return f"{before}{begin}{aliases()}\n{end}{after}"


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - MkDocs' page
    """Fill in generated parts; make links to files beyond the site plain names."""
    folder = (DOCS / page.file.src_uri).parent

    def plain(match: re.Match[str]) -> str:
        target = (folder / match[2] / match[3]).resolve()
        if target.is_relative_to(DOCS):
            return f"[{match[1]}]({match[2]}{match[3]}index.md)" if target.is_dir() else match[0]
        return f"{match[1]} (`{match[3]}`)" if target.exists() else match[0]

    filled = _MARK.sub(lambda match: GENERATED[match[1]](), markdown)
    return _LINK.sub(plain, filled)


if __name__ == "__main__":
    MOVING.write_text(with_aliases(MOVING.read_text(encoding="utf-8")), encoding="utf-8")
