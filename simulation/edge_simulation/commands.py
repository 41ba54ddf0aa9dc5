"""``edge-sdk demo``."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from edge_sdk.cli import Command
from edge_sdk.runtime import RUNTIMES


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        default="digits",
        metavar="NAME|PATH",
        help="digits, fashion-mnist, cifar10, cifar100, or your own",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where a named data set's files are")
    parser.add_argument("--devices", type=int, default=12, metavar="N", help="processes (default 12)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="a strategy (default 40)")
    parser.add_argument("--alpha", type=float, default=0.1, metavar="A", help="concentration (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--broker", metavar="URL", help="a broker of yours; an embedded one by default")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="of the embedded broker")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), default="onnx", help="of the devices")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR")


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from edge_simulation.demo import Demo, run_demo

    # SIGTERM ends the demo as Ctrl-C does: with everything that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    fields = {name: getattr(options, name) for name in Demo.__slots__}
    run_demo(Demo(**fields), Console())
    return 0


DEMO = Command("a whole fleet on this machine: FedAvg against FedAvgM on real data", _configure, _run)
