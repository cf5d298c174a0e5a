"""`headrace trace`: some steps of a server or of a run of one's own, for Perfetto."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config
from headrace.cli.http import ServerError, ask_server
from headrace.errors import ConfigError
from headrace.output_files import require_writable

if TYPE_CHECKING:
    from headrace.config import EngineConfig

_PROMPT = "Tell me about the lamp post by the house. "
_SLACK_S = 10.0


def trace(
    url: str | None = None,
    /,
    *,
    steps: int = 50,
    output: Path = Path("trace.json"),
    timeout: float = 30.0,
    api_key: Annotated[str | None, Parameter(show_default=False)] = None,
    prompt: str = _PROMPT,
    batch: int = 4,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Write what host and device do in some steps; open the file at ui.perfetto.dev.

    Args:
        url: A server that is at work; without one, an engine is started and answers prompts.
        steps: Steps to record.
        output: The file to write.
        timeout: Seconds in which a server must have taken the steps; fewer are written then.
        api_key: A key, if the server wants one.
        prompt: What an engine of one's own is asked.
        batch: How many times at once.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    for flag, value in (("--steps", steps), ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{flag} is {value} but must be at least 1")
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout:g} but must be above 0")
    require_writable("--output", output)
    if url is None:
        document = trace_engine(
            engine_config(engine), prompt=prompt, batch=batch, num_steps=steps
        )
    else:
        document = ask_server(
            url, "/trace", api_key=api_key, body={"steps": steps, "timeout_s": timeout},
            timeout_s=timeout + _SLACK_S,
        )
    recorded = document["otherData"]["steps"]
    if not recorded:
        raise ServerError(
            f"no step was taken within {timeout:g} s; send the server requests meanwhile"
        )
    output.write_text(json.dumps(document), encoding="utf-8")
    print(f"{recorded} steps in {output}; open it at https://ui.perfetto.dev")
    return 0


def trace_engine(
    config: "EngineConfig", *, prompt: str, batch: int, num_steps: int
) -> dict[str, Any]:
    """Record steps of an engine that answers a prompt several times at once.

    Args:
        config: The engine's settings.
        prompt: The prompt.
        batch: Number of requests.
        num_steps: Steps to record; fewer if all answers are done before.
    """
    # Imports torch.
    from headrace.engine.engine import Engine as RealEngine  # noqa: PLC0415
    from headrace.engine.step_trace import StepTracer  # noqa: PLC0415
    from headrace.sampling_params import SamplingParams  # noqa: PLC0415

    made = RealEngine(config)
    tokenizer = made.tokenizer
    ids = [1, 2, 3] if tokenizer is None else tokenizer.encode(prompt)
    drafts = made.parts.sizes.max_drafts
    room = made.max_prompt_tokens() - len(ids)
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max(1, min(room, num_steps * (1 + drafts)))
    )
    for number in range(batch):
        made.add_request(f"trace-{number}", ids, params)
    tracer = StepTracer(made, num_steps)
    tracer.start()
    while made.has_work() and not tracer.is_done:
        made.step()
    tracer.stop()
    return tracer.document()
