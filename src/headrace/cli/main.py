"""The `headrace` command: tokens to a command, errors to one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError, Group

from headrace import __version__
from headrace.cli.aliases import translate
from headrace.cli.settings import Layers
from headrace.errors import ConfigError, HeadraceError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130

_COMMANDS = {
    # Imported when used or when their own help is shown; the summary is for the list of commands.
    "run": ("headrace.cli.run:run", "Answer one prompt."),
    "chat": ("headrace.cli.chat:chat", "Talk with a model."),
    "serve": ("headrace.cli.serve:serve", "Serve a model over HTTP."),
    "deploy": ("headrace.cli.deploy:deploy", "Several replicas behind one address, through Ray."),
    "top": ("headrace.cli.top:top", "A server's figures, live in the terminal."),
    "trace": ("headrace.cli.trace:trace", "Some steps of a server or an engine, for Perfetto."),
    "demo": ("headrace.cli.demo:demo", "Answer five prompts and check the answers."),
    "eval": ("headrace.cli.eval:evaluate", "Score a shipped model on its tasks."),
    "inspect": ("headrace.cli.inspect:inspect", "A model's layers, state, memory; what fits."),
    "plan": ("headrace.cli.plan:plan", "What fits on GPUs that need not be here; how fast."),
    "check": ("headrace.cli.check:check", "The engine on the simulated device."),
    "bench": ("headrace.cli.bench:app", "Measure an engine or a server."),
}
_HELP = """An inference engine for hybrid models: attention beside recurrent state, exactly.

Settings come from flags, HEADRACE_* variables (--max-num-seqs is HEADRACE_MAX_NUM_SEQS), a file
given with --config, and defaults, the first that has one. vLLM's and SGLang's names are understood.
"""


def build_app(layers: Layers | None = None) -> App:
    """Build the command line.

    Args:
        layers: Fills settings from the config file and the environment; None leaves them out.
    """
    app = App(
        name="headrace",
        help=_HELP,
        version=__version__,
        config=[layers] if layers is not None else [],
        result_action="return_value",
        group_commands=Group("Commands", sort_key=0),
        group_parameters=Group("Options", sort_key=1),
    )
    for name, (where, summary) in _COMMANDS.items():
        app.command(where, name=name, help=summary)
    config = App(name="config", help="Look at settings.")
    config.command(
        "headrace.cli.config:show", name="show", help="Every setting, its value and its source."
    )
    app.command(config)
    app.register_install_completion_command(
        help="Let the shell complete commands and flags: bash, zsh or fish.",
        group=Group("Options", sort_key=1),
    )
    return app


def known_settings() -> frozenset[str]:
    """Return the name of every flag of every command, with underscores."""
    app = build_app()
    names: set[str] = set()
    for command in _with_flags([app[name] for name in _COMMANDS]):
        arguments = command.assemble_argument_collection()
        names |= {a.name.removeprefix("--").replace("-", "_") for a in arguments if a.parse}
    return frozenset(names)


def _with_flags(commands: Iterable[App]) -> Iterator[App]:
    """Yield the commands that take flags: groups of commands give way to their members."""
    for command in commands:
        if command.default_command is not None:
            yield command
        else:
            yield from _with_flags(command[name] for name in command if name[0] != "-")


def run_command(tokens: Sequence[str], *, environ: Mapping[str, str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        tokens: The arguments, without the program's name.
        environ: Variables to read settings from instead of the process's own.
    """
    is_quiet = "--quiet" in tokens or "-q" in tokens
    try:
        translation = translate(tokens)
        layers = Layers(known=known_settings, environ=environ)
        command, bound, unparsed = build_app(layers).parse_args(
            translation.tokens, exit_on_error=False, print_error=False
        )
        for note in () if is_quiet else (*translation.notes, *layers.notes):
            print(f"headrace: {note}", file=sys.stderr)
        extra = {"sources": layers.sources} if "sources" in unparsed else {}
        result = command(*bound.args, **bound.kwargs, **extra)
    except CycloptsError as error:
        return _failed(str(error), EXIT_WRONG_USE)
    except (ConfigError, RequestError) as error:
        return _failed(str(error), EXIT_WRONG_USE)
    except HeadraceError as error:
        return _failed(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`headrace run … | head -1`). Python would complain once more
        # when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the process's command line and exit."""
    raise SystemExit(run_command(sys.argv[1:]))


def _failed(message: str, code: int) -> int:
    print(f"headrace: error: {message}", file=sys.stderr)
    return code
