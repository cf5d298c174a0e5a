"""The release gate's questions to the engine, on a CPU.

Are its answers those that the training code counts as right? Are they the same without drafts? Does
it compute what the random-weight twin computes, and does every damage show there?

`python -m tools.demo_model.engine_gate demo FOLDER`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams, evals

from . import twin
from .demo_data import render
from .evaluate import prompt_text, question_and_answer, score
from .files import load
from .model import DEMO, NANO

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.evals import Example

    from .model import Shape

EVAL_SEED = 1_000_000
TWIN_SEED = 0
COUNT = 32
MODELS: dict[str, tuple[Shape, Callable[[Example], str]]] = {
    "demo": (DEMO, render),
    "nano": (NANO, prompt_text),
}


def answers(
    folder: Path, questions: list[tuple[list[int], list[int]]], **options: str
) -> list[list[int]]:
    """Let the engine answer greedily, for as many tokens as the right answers have."""
    params = [SamplingParams(temperature=0, max_tokens=len(right)) for _, right in questions]
    with LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=16, **options) as llm:
        outputs = llm.generate([prompt for prompt, _ in questions], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(name: str, folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """Compare the engine with the training code, and with itself without drafts.

    Args:
        name: "demo" or "nano".
        folder: Its files.
        count: Examples per task; of tasks with long prompts fewer.

    Returns:
        By task: how many examples, both scores, seeds judged differently, and seeds answered
        otherwise without drafts.
    """
    shape, write = MODELS[name]
    device = torch.device("cpu")
    model = load(folder, shape, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seeds: list[tuple[str, int]] = []
    questions = []
    table: dict[str, dict[str, Any]] = {}
    right: set[tuple[str, int]] = set()
    for key, task in evals.suite(name).items():
        number = max(1, count // task.cost)
        by_script = score(
            model, tokenizer, task, count=number, first_seed=EVAL_SEED, device=device,
            render=write, batch=8,
        )  # fmt: skip
        right |= {(key, seed) for seed in by_script.right}
        table[key] = {"examples": number, "script": by_script.accuracy}
        for seed in range(EVAL_SEED, EVAL_SEED + number):
            seeds.append((key, seed))
            questions.append(question_and_answer(task.generate(seed), tokenizer, write))
    everything = answers(folder, questions)
    without = answers(folder, questions, speculative="none")
    asked = zip(seeds, questions, everything, without, strict=True)
    for row in table.values():
        row |= {"engine": 0, "judged_differently": [], "changed_by_drafts": []}
    for (key, seed), (_, expected), answer, plain in asked:
        row = table[key]
        row["engine"] += (answer == expected) / row["examples"]
        if (answer == expected) != ((key, seed) in right):
            row["judged_differently"].append(seed)
        if answer != plain:
            row["changed_by_drafts"].append(seed)
    return table


def failures(table: dict[str, dict[str, Any]]) -> list[str]:
    """Name the tasks on which answers or scores differ."""
    return [
        f"engine: {key}, seeds {row[what]} {why}"
        for what, why in (
            ("judged_differently", "are not judged as by the script"),
            ("changed_by_drafts", "are answered otherwise without drafts"),
        )
        for key, row in table.items()
        if row[what]
    ]


def check(name: str, folder: Path, count: int) -> dict[str, Any]:
    """Ask everything; gives the tables and what fails."""
    torch.set_num_threads(1)
    table = compare(name, folder, count)
    result: dict[str, Any] = {"tasks": table, "failures": failures(table)}
    if name == "demo":
        with tempfile.TemporaryDirectory() as scratch:
            moved = twin.moved_in_engine(TWIN_SEED, Path(scratch))
        result["twin"] = moved
        result["failures"] += twin.failures(moved, "twin in the engine")
    return result


def begin(name: str, folder: Path, count: int = COUNT) -> subprocess.Popen[str]:
    """Start the check in a process of its own: on the CPU, while other scores use the GPU."""
    command = [sys.executable, "-m", "tools.demo_model.engine_gate", name, str(folder)]
    return subprocess.Popen(  # noqa: S603 (our own module)
        [*command, f"--count={min(count, COUNT)}"], stdout=subprocess.PIPE, text=True
    )


def end(running: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a check and give what it found.

    Raises:
        RuntimeError: It ended without a result.
    """
    printed, _ = running.communicate()
    if not printed:
        raise RuntimeError(f"the engine was not asked: exit code {running.returncode}")
    found: dict[str, Any] = json.loads(printed)
    return found


def show(result: dict[str, Any], file: Any = sys.stderr) -> None:  # noqa: ANN401 (a text stream)
    """Print the tables."""
    print(f"{'task':14s} examples  script  engine  same without drafts", file=file)
    for key, row in result["tasks"].items():
        same = "no" if row["changed_by_drafts"] else "yes"
        figures = f"{row['examples']:8d} {row['script']:7.3f} {row['engine']:7.3f}"
        print(f"{key:14s} {figures}  {same}", file=file)
    for name, by in result.get("twin", {}).items():
        print(f"twin, {name:14s} moves {by:.4f}", file=file)


def main() -> None:
    """Print one JSON object, and the tables on stderr; exit 1 if something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="examples per task")
    options = parser.parse_args()
    result = check(options.model, options.folder, options.count)
    show(result)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
