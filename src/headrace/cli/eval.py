"""`headrace eval`: a shipped model's tasks through the engine."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import orjson
from cyclopts import Parameter

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config
from headrace.errors import ConfigError
from headrace.evals import Task, suite
from headrace.weights.resolve import resolve_model, shipped_name

if TYPE_CHECKING:
    from headrace.cli.session import Session

_FIRST_SEED = 1_000_000
"""Examples of the training data are drawn with other seeds."""


def evaluate(
    model: str | None = None,
    /,
    *,
    samples: int = 16,
    task: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    damage: Literal["state", "conv", "kv"] | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Score a shipped model on its tasks; exit code 0 only if it reaches every threshold.

    Tells on stderr how far it is.

    Args:
        model: Same as --model.
        samples: Examples per task; of tasks with long prompts an eighth or fewer.
        task: Only this task; may be given several times.
        damage: Also answer with the recurrent states, convolution windows, or keys and values of
            every layer zeroed before each answer. Scores are then those of the damaged engine.
        json: Print one JSON object: tasks, thresholds, passed, samples; undamaged, if damaged.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    if samples < 1:
        raise ConfigError(f"samples is {samples} but must be at least 1")
    settings = engine_config(engine, positional_model=model)
    name = shipped_name(resolve_model(settings.model))
    if name is None:
        raise ConfigError(
            f"tasks with known answers exist for the shipped models, not for {settings.model!r}"
        )
    tasks = _chosen(suite(name), task)
    counts = {key: max(1, samples // chosen.cost) for key, chosen in tasks.items()}
    # Imports the engine, and with it torch.
    from headrace.cli.session import Session  # noqa: PLC0415
    from headrace.engine.damage import damageable  # noqa: PLC0415

    with Session(settings if damage is None else damageable(settings)) as session:
        whole = _scores(session, tasks, counts)
        hurt = {} if damage is None else _scores(session, tasks, counts, damage)
    result = Result(tasks=tasks, samples=counts, undamaged=whole, scores=hurt or whole)
    if json:
        print(orjson.dumps(result.as_json(damage), option=orjson.OPT_INDENT_2).decode())
    else:
        result.show(damage)
    return 0 if result.passed else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Scores by task.

    Args:
        tasks: What was asked.
        samples: Examples of each.
        undamaged: Share of right answers.
        scores: The same with damage, if there was any.
    """

    tasks: dict[str, Task]
    samples: dict[str, int]
    undamaged: dict[str, float]
    scores: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether every threshold is reached."""
        return all(self.scores[key] >= task.threshold for key, task in self.tasks.items())

    def as_json(self, damage: str | None) -> dict[str, object]:
        """Give the keys of docs/interfaces.md."""
        values: dict[str, object] = {
            "tasks": self.scores,
            "thresholds": {key: task.threshold for key, task in self.tasks.items()},
            "passed": self.passed,
            "samples": self.samples,
        }
        return values if damage is None else {
            **values, "damage": damage, "undamaged": self.undamaged,
        }

    def show(self, damage: str | None) -> None:
        """Print a table."""
        for key, task in self.tasks.items():
            before = "" if damage is None else f"{self.undamaged[key]:7.1%} ->"
            print(
                f"{key:<14}{before}{self.scores[key]:7.1%}  (needed: {task.threshold:.0%}) "
                f"of {self.samples[key]:>3}  {task.summary}"
            )
        if damage is not None:
            print(f"The second figure: {damage} of every layer zeroed before each answer.")
        print("passed" if self.passed else "FAILED")


def _chosen(tasks: dict[str, Task], names: tuple[str, ...]) -> dict[str, Task]:
    """Keep the named tasks, all if none is named."""
    for name in names:
        if name not in tasks:
            raise ConfigError(f"there is no task {name!r}; tasks: {', '.join(tasks)}")
    return {key: task for key, task in tasks.items() if not names or key in names}


def _scores(
    session: "Session",
    tasks: dict[str, Task],
    counts: dict[str, int],
    damage: Literal["state", "conv", "kv"] | None = None,
) -> dict[str, float]:
    """Shares of right answers by task, each told on stderr as it comes."""
    scores: dict[str, float] = {}
    for number, (key, task) in enumerate(tasks.items(), start=1):
        with_what = "" if damage is None else f", {damage} damaged"
        print(
            f"{number} of {len(tasks)}: {key}, {counts[key]} examples{with_what} ...",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip
        begin = time.monotonic()
        scores[key] = _score(session, task, counts[key], damage)
        took = time.monotonic() - begin
        print(f" {scores[key]:.1%} right, {took:.1f} s", file=sys.stderr, flush=True)
    return scores


def _score(
    session: "Session",
    task: Task,
    samples: int,
    damage: Literal["state", "conv", "kv"] | None = None,
) -> float:
    """Share of right answers, all examples asked together."""
    # Imported by the session already.
    from headrace.engine.damage import damaged_answers  # noqa: PLC0415

    examples = [task.generate(_FIRST_SEED + number) for number in range(samples)]
    prompts = [
        session.chat_tokens(example.messages, example.tools)
        if example.messages
        else session.prompt_tokens(example.prompt, raw=True)
        for example in examples
    ]
    params = session.sampling_params(seed=None, temperature=0.0, max_tokens=task.max_tokens)
    if damage is None:
        answers = session.answers(prompts, params)
    else:
        answers = damaged_answers(session.llm.engine, prompts, params, damage)
    right = sum(e.is_right(text) for e, text in zip(examples, answers, strict=True))
    return right / samples
