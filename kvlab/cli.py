"""The `kvlab` command: its groups of subcommands, and their error messages.

Heavy modules are imported inside the commands, so that `kvlab --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvlab.commands import (
    experiments,
    exploring,
    learning,
    measuring,
    scoring,
    showing,
    stability,
    stock,
    tasks,
    workspaces,
)
from kvlab.errors import KvlabError, nearest
from kvlab.lib import environment, extras
from kvlab.lib.addresses import without_password

HELP = """A laboratory for KV-cache compression: what a paper claims, measured again on a real model, offline.

A first run, from nothing to a report:   kvlab reproduce
"""

app = typer.Typer(
    name="kvlab",
    help=HELP,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS = {
    "Models, texts and this machine": (stock,),
    "Experiments and verdicts": (experiments, stability, showing),
    "Tasks and scores": (tasks, scoring),
    "Measure one thing": (exploring, measuring),
    measuring.LEARNT: (learning,),
    "A workspace of your own": (workspaces,),
}
"""The groups of commands, in the order in which `kvlab --help` shows them."""


def _in_panels() -> None:
    """Give every command its group, and put the examples in its help on lines of their own."""
    for panel, modules in PANELS.items():
        for module in modules:
            for command in module.app.registered_commands:
                command.rich_help_panel = command.rich_help_panel or panel
                if command.epilog:
                    examples = command.epilog.removeprefix("Examples:").split("   |   ")
                    command.epilog = "\n".join(["Examples:", *(f"  {example.strip()}" for example in examples)])
            app.add_typer(module.app)


_in_panels()


def _version(wanted: bool) -> None:
    if wanted:
        from kvlab.workbench.project import version

        typer.echo(f"kvlab {version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The console script: a mistake becomes one sentence on stderr and a non-zero exit code, never a traceback."""
    environment.configure()
    debug = os.environ.get("KVLAB_DEBUG") == "1"
    if sys.stdout is None:  # it was closed before the start
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        with _plain_warnings():
            code = app(arguments, prog_name="kvlab", standalone_mode=False)
        sys.stdout.flush()  # so that a full disk or a closed pipe raises its error here
    except KvlabError as error:
        _leave(str(error), 1, debug)
    except KeyboardInterrupt:
        _leave("interrupted", 130, debug)
    except BrokenPipeError:
        _drop_output()  # the reader of a pipe is gone, as `head` is after ten lines
        code = 0
    except ModuleNotFoundError as error:
        _leave(extras.sentence(error.name) or _unforeseen(error), 1, debug)
    except Exception as error:
        if type(error).__name__ == "Abort":
            _leave("interrupted", 130, debug)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is on the screen already
            sys.exit(0)
        if hasattr(error, "format_message"):  # what typer raises for a mistake on the command line
            _leave(_usage(error), getattr(error, "exit_code", 2), debug)
        if isinstance(error, OSError):
            _drop_output()
        _leave(_unforeseen(error), 1, debug)
    if code == 130:  # typer has caught the interrupt itself, and returns this code
        print("kvlab: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings are a sentence, without the place in the code; others stay as they are."""
    whole, own = warnings.formatwarning, Path(__file__).parent

    def formatted(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        ours = category is UserWarning and Path(filename).is_relative_to(own)
        return f"kvlab: {message}\n" if ours else whole(message, category, filename, *place)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = whole


def _drop_output() -> None:
    """Throw away what stdout still holds: otherwise the interpreter raises the same error once more as it ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> str:
    message = " ".join(str(error.format_message()).split())
    if message.startswith("No such command"):
        wanted = message.split("'")[1]
        group = get_command(app)
        assert isinstance(group, TyperGroup)
        message = nearest(wanted, group.commands, "command")
    command = getattr(getattr(error, "ctx", None), "command_path", None) or "kvlab"
    return message.removeprefix("Invalid value: ").rstrip(".") + f"; see {command} --help"


def _unforeseen(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, OSError):
        return f"{error.strerror or first}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {first} (KVLAB_DEBUG=1 shows where)"


def _leave(sentence: str, code: int, debug: bool) -> NoReturn:
    if debug:
        raise
    # A file's name in it may hold line breaks or a terminal's control codes; these are written as escapes.
    words = " ".join(without_password(sentence).split())
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)
    # stderr may be closed.
    with suppress(OSError, ValueError, AttributeError):
        print(f"kvlab: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
