"""Write the README's table of families from the registry.

    python tools/family_table.py            # rewrite it
    python tools/family_table.py --check    # exit with 1 if it is not what it should be

Nothing in the table is typed by hand: kinds of state, drafts and kernels come from running the
small model of each family, and the figure of parity is the largest error that several runs of
`pytest -m parity` gave, which checks that later ones are of that order.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.config import EngineConfig
from headrace.engine.load import load_parts
from headrace.errors import ConfigError
from headrace.models.reference_loop import run_reference
from headrace.models.registry import FAMILIES, Family, check_parts, family
from headrace.testing import KERNEL_FAMILIES, KERNEL_SIZES, TINY_DICTS, tiny_family

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from headrace.models.config import ModelConfig

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FIGURES = ROOT / "tests" / "parity" / "figures.json"
OPS = Path(headrace.__file__).parent / "ops"
BEGIN, END = "<!-- families:begin -->\n", "<!-- families:end -->\n"
HEADER = (
    "| checkpoints | states | MTP | prefix cache | other drafts | tensor parallel | GPU kernels "
    "| parity |\n|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is true of one small model of a family."""

    states: tuple[str, ...]
    has_mtp: bool
    caches_prefixes: bool
    takes_drafts: bool
    runs_in_parallel: bool
    kernels: frozenset[str]
    error: float


def main() -> int:
    """Rewrite or check the table."""
    text = README.read_text(encoding="utf-8")
    wanted = with_table(text)
    if wanted == text:
        return 0
    if "--check" in sys.argv[1:]:
        sys.stderr.write(
            "README.md: the table of families is out of date; run python tools/family_table.py\n"
        )
        return 1
    README.write_text(wanted, encoding="utf-8")
    return 0


def with_table(text: str) -> str:
    """Return the README with the table that the registry gives."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"README.md lacks {BEGIN!r} or {END!r}"
    return before + BEGIN + table() + END + after


def table() -> str:
    """Make the table, a row for each family."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    found: dict[int, list[Facts]] = {i: [] for i in range(len(FAMILIES))}
    missing = sorted(TINY_DICTS.keys() - figures.keys())
    assert not missing, f"{FIGURES.relative_to(ROOT)} has no figure for {', '.join(missing)}"
    for name, tiny in TINY_DICTS.items():
        found[FAMILIES.index(family(tiny()))].append(facts(name, figures[name]))
    rows = [row(each, found[i]) for i, each in enumerate(FAMILIES)]
    return HEADER + "".join(sorted(rows))


def row(each: Family, known: list[Facts]) -> str:
    """Make one row."""
    names = sorted({name for accepted in each.architectures.values() for name in accepted})
    assert known, f"{names} has no small model in headrace.testing.TINY_DICTS"
    kernels = sorted(frozenset.union(*(one.kernels for one in known)))
    cells = (
        ", ".join(f"`{name}`" for name in names),
        ", ".join(dict.fromkeys(kind for one in known for kind in one.states)),
        _yes(any(one.has_mtp for one in known)),
        _yes(all(one.caches_prefixes for one in known)),
        _yes(all(one.takes_drafts for one in known)),
        _yes(all(one.runs_in_parallel for one in known)),
        ", ".join(f"`{name}`" for name in kernels) or "no: PyTorch operations",
        f"{max(one.error for one in known):.0e}".replace("e-0", "e-"),
    )
    return "| " + " | ".join(cells) + " |\n"


def facts(name: str, error: float) -> Facts:
    """Look at the small model of a family."""
    model: Any = tiny_family(name)
    engine = {"model": "tiny", "device": "cpu", "max_num_seqs": 1, "max_model_len": 128}
    parts = load_parts(EngineConfig(**engine, speculative="ngram:2"), model=model)
    kernels: frozenset[str] = frozenset()
    has_delta = KERNEL_SIZES.keys() <= TINY_DICTS[name]().keys()
    sizes = KERNEL_FAMILIES.get(name, KERNEL_SIZES if has_delta else {})
    suited = tiny_family(name, **sizes)
    if suited.kernel_obstacle(suited.config) is None:
        run = partial(run_reference, suited, [1, 2, 3], 2, kernels="triton")
        kernels = frozenset(kernels_of(run))
    return Facts(
        states=tuple(dict.fromkeys(group.kind for group in model.state_groups(0))),
        has_mtp=hasattr(model, "mtp"),
        caches_prefixes=parts.scheduler.cache.is_enabled,
        takes_drafts=parts.sizes.max_drafts == 2,  # noqa: PLR2004
        runs_in_parallel=_is_divided(model.config),
        kernels=kernels,
        error=error,
    )


def _is_divided(config: ModelConfig) -> bool:
    try:
        check_parts(config, 2)
    except ConfigError:
        return False
    return True


def kernels_of(run: Callable[[], object]) -> set[str]:
    """Return the operations with a kernel that a run goes through."""
    reached: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        folder = Path(frame.f_code.co_filename).parent
        if event == "call" and folder.parent == OPS and (folder / "kernel.py").exists():
            reached.add(folder.name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return reached


def _yes(value: bool) -> str:  # noqa: FBT001
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(main())
