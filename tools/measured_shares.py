"""Write what share of the floor decoding reached, for `headrace plan`, from a run of the GPU table.

    python tools/measured_shares.py benchmarks/results/h200-quick.json 1:plain 2:forced

Each N:GROUP names rows of the file's run N that are kept. Where the group's steps were profiled at
a batch, their time counts and not the row's: a row subtracts two times of seconds, and a profiled
step is slower than others, if anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "headrace" / "bench" / "shares.json"


def main() -> int:
    """Write the file."""
    document = shares_of(Path(sys.argv[1]), sys.argv[2:])
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def shares_of(file: Path, groups: list[str]) -> dict[str, Any]:
    """Take shares from a file of results.

    Args:
        file: With `runs`, or itself one run, as `benchmarks/h200_table.py` writes it.
        groups: RUN:GROUP of the rows to keep; one group without drafts, one with.

    Returns:
        `shares.json`: source, device, and a list of shares by batch for each group.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    runs = document.get("runs", [document])
    found = [_group(runs[int(run)], group) for run, _, group in (g.partition(":") for g in groups)]
    return {
        "source": f"{file.resolve().relative_to(ROOT)} {' '.join(groups)}",
        "device": runs[int(groups[0].partition(":")[0])]["device"],
        "groups": found,
    }


def _group(run: dict[str, Any], name: str) -> dict[str, Any]:
    profiled = {p["batch"]: p["step_ms"] for p in run["profiles"] if p["group"] == name}
    rows = [row for row in run["rows"] if row.get("group") == name and row["tokens_per_s"]]
    by_batch = {
        row["batch"]: (
            1e3 * row["floor_s"] / profiled[row["batch"]]
            if row["batch"] in profiled
            else row["share_of_floor"]
        )
        for row in rows
    }
    engine = rows[0]["engine"]
    drafts = engine["speculative"].rpartition(":")[2]
    return {
        "shape": rows[0]["shape"],
        "state_dtype": rows[0]["state_dtype"],
        "state_scheme": engine["state_scheme"],
        "num_drafts": 0 if drafts == "none" else int(drafts),
        "by_batch": {str(batch): round(by_batch[batch], 3) for batch in sorted(by_batch)},
    }


if __name__ == "__main__":
    raise SystemExit(main())
