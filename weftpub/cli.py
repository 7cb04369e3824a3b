"""The `weftpub` command: what the core itself can show, plus the commands that installed packages add.

A package adds a command by an entry point in the group `weftpub.commands` whose value is a typer command function; the
core knows none of them, so imports keep going down. Errors that weftpub raises on purpose end as one readable message
and exit code 1; `weftpub --debug ...` lets the traceback through.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weftpub import __version__
from weftpub.errors import WeftpubError

if TYPE_CHECKING:
    from weftpub_kernels import Recipe

__all__ = ["COMMAND_GROUP", "build_app", "installed_commands", "main", "run"]

COMMAND_GROUP = "weftpub.commands"

Command = Callable[..., Any]


@dataclass
class _Options:
    debug: bool = False


def installed_commands(points: Iterable[EntryPoint] | None = None) -> dict[str, Command]:
    """The command functions that installed packages add, by name.

    A command that cannot be imported is left out with one line on stderr: it must not take the others down with it.
    """
    commands: dict[str, Command] = {}
    for point in entry_points(group=COMMAND_GROUP) if points is None else points:
        try:
            commands[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            print(f"weftpub: command {point.name!r} ({point.value}) cannot be loaded: {error}", file=sys.stderr)
    return commands


def build_app(commands: Mapping[str, Command], options: _Options | None = None) -> typer.Typer:
    """The typer application with the core's commands and the given ones."""
    settings = options if options is not None else _Options()
    app = typer.Typer(
        name="weftpub",
        help="Publish FP8 MoE weights: one set of bytes for trainer and rollout engine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def top(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
        ] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of weftpub's own errors.")] = False,
    ) -> None:
        settings.debug = debug

    app.command("presets")(_presets)
    for name, command in sorted(commands.items()):
        app.command(name)(command)
    return app


def run(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] | None = None) -> int:
    """Run the command line and return its exit code; weftpub's own errors become one message on stderr and code 1."""
    options = _Options()
    app = build_app(installed_commands() if commands is None else commands, options)
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="weftpub")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except _own_errors() as error:
        if options.debug:
            raise
        message = f"[bold red]weftpub: {type(error).__name__}:[/] {escape(str(error))}"
        Console(stderr=True, soft_wrap=True, highlight=False).print(message)
        return 1
    return 0


def main() -> None:
    """Entry point of the `weftpub` script."""
    sys.exit(run())


def _own_errors() -> tuple[type[Exception], ...]:
    # The kernels load torch: only a command that already ran can have raised one of their errors.
    kernels = sys.modules.get("weftpub_kernels")
    return (WeftpubError,) if kernels is None else (WeftpubError, kernels.KernelError)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"weftpub {__version__}")
        raise typer.Exit


def _presets(as_json: Annotated[bool, typer.Option("--json", help="Print the recipes as JSON.")] = False) -> None:
    """List the quantizer presets: whose bytes they are, where they run, and whether they may be published."""
    from weftpub_kernels import PRESETS

    if as_json:
        rows = [
            {
                "name": name,
                "source": recipe.source,
                "input": _dtype_name(recipe),
                "amax_floor": recipe.amax_floor,
                "cpu": recipe.ieee,
                "publishable": recipe.publishable,
                "note": recipe.note,
            }
            for name, recipe in PRESETS.items()
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="Quantizer presets (value = code x dequant scale, blocks of 128 x 128)")
    for heading in ("preset", "input", "floor", "runs on", "whose bytes, and what to know"):
        table.add_column(heading, overflow="fold")
    for name, recipe in PRESETS.items():
        said = recipe.source, recipe.note, "" if recipe.publishable else "not publishable"
        table.add_row(
            name,
            _dtype_name(recipe),
            f"{recipe.amax_floor:g}" if recipe.amax_floor else "none",
            "CPU, GPU" if recipe.ieee else "GPU",
            escape("; ".join(filter(None, said))),
            end_section=True,
        )
    Console().print(table)


def _dtype_name(recipe: "Recipe") -> str:
    return str(recipe.input_dtype).removeprefix("torch.")
