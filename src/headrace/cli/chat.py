"""`headrace chat`: a conversation in the terminal."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.flags import (
    ConfigFile,
    Engine,
    EngineFlags,
    SamplingFlags,
    engine_config,
    sampling_seed,
)
from headrace.config import user_state_folder
from headrace.errors import RequestError
from headrace.evals import ABILITIES
from headrace.weights.resolve import resolve_model, shipped_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.cli.session import Session
    from headrace.sampling_params import SamplingParams

_MAX_REMEMBERED = 1000
_COMMAND = re.compile("/[a-z]+")
_HELP = '''/reset forgets the conversation, /stats tells what the last answer took, /exit ends.
The arrow keys bring earlier lines back, those of earlier conversations too.
A line that ends with \\ goes on in the next one; """ begins and ends a text of several lines.'''


def chat(
    *,
    system: str | None = None,
    config: ConfigFile = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008 - frozen
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
    sources: Annotated[dict[str, str] | None, Parameter(parse=False)] = None,
) -> int:
    """Talk with a model: it remembers the conversation, and the prefix cache its computation.

    Args:
        system: Text of the system turn.
        config: YAML, JSON or TOML file with settings named like flags.
        sampling: How tokens are chosen.
        engine: The engine's settings.
        sources: Where each setting came from.
    """
    del config
    # Imports the engine, and with it torch.
    from headrace.cli.session import Session  # noqa: PLC0415

    settings = engine_config(engine)
    with Session(settings) as session, line_history(user_state_folder() / "chat_history"):
        params = session.sampling_params(seed=sampling_seed(engine, sources), **sampling.given())
        conversation = Conversation(session, params, system=system)
        _hint(greeting(shipped_name(resolve_model(settings.model)), settings.model))
        while (text := read_message()) is not None:
            if not conversation.take(text):
                break
    return 0


def greeting(shipped: str | None, model: str) -> str:
    """Say what one is talking to and, of a shipped model, what it can and cannot do.

    Args:
        shipped: Name of the shipped model, None for any other.
        model: What the user calls it.
    """
    lines = [f"{shipped or model}; /help for help, Ctrl-D to end"]
    if shipped is not None:
        about = ABILITIES[shipped]
        lines += [about.can, about.cannot, "Try:", *(f"  {text}" for text in about.ask)]
    return "\n".join(lines)


class Conversation:
    """The turns so far and what the user may do with them."""

    def __init__(self, session: "Session", params: "SamplingParams", *, system: str | None) -> None:
        """Begin with the system turn alone, if there is one."""
        self._session = session
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.history = list(self._opening)
        self._commands: dict[str, Callable[[], None]] = {
            "": lambda: None,
            "/help": lambda: _hint(_HELP),
            "/reset": self._reset,
            "/stats": self._stats,
        }

    def take(self, text: str) -> bool:
        """Answer a message or obey a command.

        Returns:
            Whether the conversation goes on.
        """
        command = text.strip()
        if command in {"/exit", "/quit"}:
            return False
        if command in self._commands:
            self._commands[command]()
        elif _COMMAND.fullmatch(command):
            # Answering it would look like a model that misunderstands.
            _hint(f"no command {command}; /help lists them")
        else:
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            prompt = self._session.chat_tokens([*self.history, question])
            for piece in self._session.stream(prompt, self._params):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except RequestError as error:
            # The conversation goes on without the turn that could not be answered.
            _hint(f"error: {error}")
            return
        except KeyboardInterrupt:
            # What came before Ctrl-C stays in the conversation, as the user has read it.
            _hint("\ninterrupted")
        print()
        self.history += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _reset(self) -> None:
        self.history = list(self._opening)
        _hint("forgotten")

    def _stats(self) -> None:
        from headrace.cli.figures import print_figures  # noqa: PLC0415 - rich.table is slow

        if len(self.history) > len(self._opening):
            print_figures(self._session.figures())
        else:
            _hint("nothing was asked yet")


@contextlib.contextmanager
def line_history(file: Path) -> Iterator[None]:
    """Let a terminal's lines be edited and found again with the arrow keys, now and next time.

    Args:
        file: Where lines are kept. One that cannot be read or written is passed over with a line.
    """
    try:
        import readline  # noqa: PLC0415 - not on every platform, and it takes over the terminal
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    readline.set_history_length(_MAX_REMEMBERED)
    try:
        readline.read_history_file(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        _hint(f"earlier lines cannot be read: {error}")
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
        except OSError as error:
            _hint(f"lines cannot be kept for next time: {error}")


def read_message() -> str | None:
    r"""Read what the user says next, several lines after \ or between triple quotes.

    Returns:
        The text, or None at the end of input or on Ctrl-C.
    """
    try:
        line = input(_prompt("> "))
        if line.lstrip().startswith('"""'):
            return _read_quoted(line.lstrip().removeprefix('"""'))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_prompt(". ")))
        return "\n".join(lines)
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        # What follows it in a pipe cannot be told apart from it any more.
        raise RequestError(f"standard input is no text: {error}; send UTF-8") from None


def _read_quoted(first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input(_prompt(". ")))
    lines[-1] = lines[-1].rstrip().removesuffix('"""')
    return "\n".join(lines)


def _prompt(mark: str) -> str:
    # Piped input gets no marks: the output is then the answers alone.
    return mark if sys.stdin.isatty() else ""


def _hint(text: str) -> None:
    print(text, file=sys.stderr)
