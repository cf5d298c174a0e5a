"""`headrace run`: one prompt, one answer."""

import dataclasses
import logging
import sys
import warnings
from typing import Annotated

import orjson
from cyclopts import Parameter

from headrace.cli.flags import (
    ConfigFile,
    Engine,
    EngineFlags,
    SamplingFlags,
    engine_config,
    sampling_seed,
)
from headrace.errors import RequestError


def run(
    prompt: str | None = None,
    /,
    *,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False,
    stats: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    raw: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFile = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008 - frozen
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
    sources: Annotated[dict[str, str] | None, Parameter(parse=False)] = None,
) -> int:
    """Answer one prompt; the text comes as it is generated.

    Args:
        prompt: What to ask; without one it is read from a pipe on standard input.
        quiet: Print the answer alone, nothing on stderr.
        stats: Print a table of figures at the end, on stderr.
        json: Print one JSON object with the answer and its figures instead of text.
        raw: Let the model continue the prompt as it stands, without its chat template.
        config: YAML, JSON or TOML file with settings named like flags.
        sampling: How tokens are chosen.
        engine: The engine's settings.
        sources: Where each setting came from.
    """
    del config
    if quiet:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    if prompt is None:
        prompt = _piped_prompt()
    if not prompt.strip() and not raw:
        raise RequestError("the prompt is empty; write a question", param="prompt")
    # Imports the engine, and with it torch.
    from headrace.cli.session import Session  # noqa: PLC0415

    with Session(engine_config(engine)) as session:
        params = session.sampling_params(seed=sampling_seed(engine, sources), **sampling.given())
        pieces: list[str] = []
        for piece in session.stream(session.prompt_tokens(prompt, raw=raw), params):
            pieces.append(piece)
            if not json:
                print(piece, end="", flush=True)
        if json:
            answer = {
                "model": engine.model,
                "text": "".join(pieces),
                "finish_reason": session.finish_reason,
                **dataclasses.asdict(session.figures()),
            }
            print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        else:
            print()
        # Who set the limit expects it.
        for note in session.notes(params) if sampling.max_tokens is None and not quiet else ():
            print(f"headrace: {note}", file=sys.stderr)
        if stats and not quiet:
            from headrace.cli.figures import print_figures  # noqa: PLC0415

            print_figures(session.figures())
    return 0


def _piped_prompt() -> str:
    if sys.stdin.isatty():
        raise RequestError('a prompt is needed: headrace run "PROMPT"', param="prompt")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the prompt on standard input is no text: {error}; send UTF-8", param="prompt"
        ) from None
