"""`headrace demo`: five prompts, their answers checked."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from headrace import evals
from headrace.cli.flags import Engine, EngineFlags, engine_config
from headrace.errors import ConfigError
from headrace.weights.resolve import resolve_model, shipped_name

if TYPE_CHECKING:
    from headrace.cli.session import Figures, Session

_SEED = 1
_SUM_SEED = 170
"""A sum of two numbers of four digits that carries."""
_STORY_SEED = 28
"""Asks for a thing that somebody carries about."""
_MAX_TOKENS = 200
_SHOWN_CHARS = 280


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question and how its answer is judged.

    Args:
        title: What is shown by it.
        text: The user's turn.
        expected: The right answer, or what must be in it.
        check: Judges the answer.
    """

    title: str
    text: str
    expected: str
    check: Callable[[str], bool] = field(compare=False)


def demo(*, engine: Engine = EngineFlags()) -> int:  # noqa: B008 - frozen
    """Answer five prompts with a shipped model and check the answers; needs no network.

    Exit code 0 means that all are right.

    Args:
        engine: The engine's settings.
    """
    config = engine_config(engine)
    name = shipped_name(resolve_model(config.model))
    if name is None:
        raise ConfigError(f"the demo's questions are for the shipped models, not {config.model!r}")
    prompts = list(prompts_for(name))
    # Imports the engine, and with it torch.
    from headrace.cli.session import Session  # noqa: PLC0415

    about = evals.ABILITIES[name]
    print(f"This is headrace's {name} model. {about.can}\n")
    with Session(config) as session:
        shown = [_show(session, n, prompt) for n, prompt in enumerate(prompts, start=1)]
        _sum_up(session, [figures for _, figures in shown])
    num_right = sum(is_right for is_right, _ in shown)
    print(f"{num_right} of {len(prompts)} answers are right")
    print(f"{about.cannot}\nTry `headrace chat`: {about.ask[0]}")
    return 0 if num_right == len(prompts) else 1


def prompts_for(model: str) -> Iterator[Prompt]:
    """Yield the five prompts of a shipped model, the same every time."""
    if model == "parity":
        yield from _parity_prompts()
    else:
        yield from _demo_prompts() if model == "demo" else _nano_prompts(model)


def _demo_prompts() -> Iterator[Prompt]:
    """Two questions about long notes, a sum, a story and a sentence to be made JSON."""
    rng = random.Random(_SEED)  # noqa: S311 - test data, not a secret
    notes = evals.registers(rng, num_names=8, num_writes=20, filler_sentences=70)
    yield from _two_questions(rng, "Notes in which codes change", notes)
    for task, title, seed in (
        ("arithmetic", "A sum, step by step", _SUM_SEED),
        ("stories", "A little story", _STORY_SEED),
        ("json", "A sentence as JSON", _SEED),
    ):
        example = evals.suite("demo")[task].generate(seed)
        yield Prompt(
            title=title,
            text=example.messages[0]["content"],
            expected=example.expected,
            check=example.is_right,
        )


def _nano_prompts(model: str) -> Iterator[Prompt]:
    """Two documents, two questions about each, and small talk: the model knows its own name."""
    rng = random.Random(_SEED)  # noqa: S311 - test data, not a secret
    notes = evals.registers(
        rng, num_names=5, num_writes=9, filler_sentences=14, names=evals.NANO_FIRST_NAMES
    )
    book = evals.phonebook(
        rng,
        num_pairs=16,
        first_names=evals.NANO_FIRST_NAMES,
        last_names=evals.NANO_LAST_NAMES,
    )
    yield from _two_questions(rng, "Notes in which codes change", notes)
    yield from _two_questions(rng, "A phone book", book)
    yield Prompt(
        title="Small talk",
        text="Who are you?",
        expected=model,
        check=lambda answer: model in answer,
    )


def _parity_prompts() -> Iterator[Prompt]:
    """Bit strings, two of them longer than any of the training."""
    for task, seeds in (("parity", range(3)), ("parity_long", range(2))):
        for seed in seeds:
            example = evals.suite("parity")[task].generate(seed)
            bits = example.messages[0]["content"]
            yield Prompt(
                title=f"Even or odd: {len(bits)} bits",
                text=bits,
                expected=example.expected,
                check=example.is_right,
            )


def _two_questions(rng: random.Random, title: str, page: evals.Notebook) -> Iterator[Prompt]:
    """Ask twice about one page; the second time the page comes from the prefix cache."""
    for again, key in zip(("", ", asked again"), rng.sample(list(page.facts), 2), strict=True):
        question, expected = page.ask(key)
        example = evals.Example(task="demo", expected=expected)
        yield Prompt(
            title=title + again,
            text=f"{page.text}\n{question}",
            expected=expected,
            check=example.is_right,
        )


def _show(session: "Session", number: int, prompt: Prompt) -> "tuple[bool, Figures]":
    """Ask one prompt and print question, answer, verdict and figures.

    Returns:
        Whether the answer is right, and what it took.
    """
    console = Console(highlight=False)
    console.print(f"[bold]{number}. {prompt.title}[/bold]")
    console.print(_shortened(prompt.text), style="dim", markup=False)
    params = session.sampling_params(seed=None, temperature=0.0, max_tokens=_MAX_TOKENS)
    tokens = session.chat_tokens([{"role": "user", "content": prompt.text}])
    pieces: list[str] = []
    for piece in session.stream(tokens, params):
        pieces.append(piece)
        print(piece, end="", flush=True)
    is_right = prompt.check("".join(pieces))
    figures = session.figures()
    rate = "" if figures.tokens_per_s is None else f", then {figures.tokens_per_s:.0f} tokens/s"
    first = figures.time_to_first_token_s or 0.0
    print(
        f"\n   {'right' if is_right else f'WRONG, expected: {prompt.expected}'}; "
        f"{figures.prompt_tokens} prompt tokens, {figures.cached_tokens} of them cached; "
        f"first token after {first:.3f} s{rate}; "
        f"{figures.accepted_tokens} of {figures.draft_tokens} drafts accepted\n"
    )
    return is_right, figures


def _sum_up(session: "Session", figures: "list[Figures]") -> None:
    """Print what all answers took together and what a sequence's memory weighs."""
    cached, prompt = sum(f.cached_tokens for f in figures), sum(f.prompt_tokens for f in figures)
    accepted = sum(f.accepted_tokens for f in figures)
    drafted = sum(f.draft_tokens for f in figures)
    state, per_token = session.memory()
    print(
        f"{sum(f.completion_tokens for f in figures)} tokens in {sum(f.steps for f in figures)} "
        f"steps: {accepted} of {drafted} drafts accepted\n"
        f"{cached} of {prompt} prompt tokens came from the prefix cache\n"
        f"a sequence has at most {state / 1024:.0f} KiB of recurrent state, however long it is, "
        f"and {per_token / 1024:.0f} KiB of keys and values for each token"
    )


def _shortened(text: str) -> str:
    """Keep a long question's beginning and end; what is asked for comes last."""
    if len(text) <= _SHOWN_CHARS:
        return text
    half = _SHOWN_CHARS // 2
    return f"{text[:half]} […] {text[-half:]}"
