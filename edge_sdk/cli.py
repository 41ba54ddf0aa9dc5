"""The command ``edge-sdk``: each room registers its subcommands by entry point."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import NoReturn

from edge_sdk.errors import EdgeError

GROUP = "edge_sdk.commands"

_MODULES_OF_EXTRA = {
    "onnx": {"onnxruntime"},
    "images": {"PIL"},
    "server": {"sqlalchemy", "tomli"},
    "export": {"torch", "onnx"},
    "simulation": {"amqtt", "jinja2", "rich", "sklearn"},
}


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: a line of help, its arguments, and what it does (returns the exit status)."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 2 and one line on stderr for bad input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    found = {point.name: point for point in entry_points(group=GROUP)}
    try:
        # Only the chosen command is imported, so that a board without the server's parts can run its own.
        chosen = arguments[0] if arguments and arguments[0] in found else None
        parser, parsers = _parser()
        for name in sorted(found) if chosen is None else [chosen]:
            try:
                command: Command = found[name].load()
            except ModuleNotFoundError as error:
                if chosen is None:
                    parsers.add_parser(name, help=f"(not installed: {error.name} is missing)")
                    continue
                raise
            sub = parsers.add_parser(name, help=command.help, description=command.help)
            command.configure(sub)
            sub.set_defaults(run=command.run)
        options = parser.parse_args(arguments)
        if not hasattr(options, "run"):
            parser.print_help()
            return 2
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except EdgeError as error:
        print(f"edge-sdk: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"edge-sdk: {_missing(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; a second error at interpreter exit would say so again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> tuple[_Parser, argparse._SubParsersAction[_Parser]]:
    parser = _Parser(prog="edge-sdk", description="Federated learning for phones and IoT boards, over MQTT.")
    return parser, parser.add_subparsers(metavar="COMMAND")


def _missing(error: ModuleNotFoundError) -> str:
    top = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in _MODULES_OF_EXTRA.items() if top in modules), None)
    if extra is None:
        raise error
    return f"this needs {top}, which is not installed: pip install 'edge-sdk-fl[{extra}]'"


if __name__ == "__main__":
    sys.exit(main())
