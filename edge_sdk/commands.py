"""``edge-sdk device`` and ``edge-sdk inspect``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edge_sdk.bundle import Bundle
from edge_sdk.cli import Command
from edge_sdk.client import EdgeClient, Visit
from edge_sdk.data import load
from edge_sdk.description import Sharing
from edge_sdk.errors import BrokerError
from edge_sdk.manifest import Input
from edge_sdk.protocol import check_id
from edge_sdk.runtime import RUNTIMES
from edge_sdk.transport import Credentials
from edge_sdk.work import Engine


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`read_credentials`."""
    parser.add_argument("--username", metavar="U", help="the broker's login")
    parser.add_argument("--password-file", metavar="F", help="the password is its first line")
    parser.add_argument("--ca", metavar="F", help="certificate authority (PEM)")
    parser.add_argument("--cert", metavar="F", help="this peer's certificate (PEM)")
    parser.add_argument("--key", metavar="F", help="the key of --cert (PEM)")


def read_credentials(
    username: str | None,
    password_file: str | None,
    ca: str | None,
    cert: str | None,
    key: str | None,
) -> Credentials:
    """Login and TLS files as the command's options name them; BrokerError if one is of no use."""
    password = None
    if password_file is not None:
        if username is None:
            raise BrokerError("a password needs a user name: give --username")
        try:
            password = Path(password_file).read_text().splitlines()[0]
        except (OSError, IndexError, UnicodeDecodeError):
            raise BrokerError(f"no password in {password_file}: write it in the first line") from None
    files = [Path(file) if file is not None else None for file in (ca, cert, key)]
    return Credentials(username=username, password=password, ca=files[0], cert=files[1], key=files[2])


def stop_on_signals(stop: Callable[[], None]) -> threading.Event:
    """Call ``stop`` on Ctrl-C and SIGTERM; a second one ends the process at once.

    Returns:
        An event that is set once a signal has come.
    """
    stopped = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()
        stop()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return stopped


def _configure_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--broker", required=True, metavar="URL", help="mqtt://HOST[:PORT] or mqtts://…")
    parser.add_argument("--fleet", required=True, metavar="F")
    parser.add_argument("--data", required=True, metavar="PATH", help="IDX, CIFAR, .npz, a folder per class")
    parser.add_argument("--id", metavar="ID", help="this device's id; made once and kept by default")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where identity and models are kept")
    parser.add_argument("--bundle", type=Path, metavar="F.edge", help="fetched from the server by default")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), default="onnx")
    parser.add_argument("--threads", type=count, default=0, metavar="N", help="0: one a physical core")
    parser.add_argument("--provider", action="append", metavar="NAME", help="ONNX Runtime execution provider")
    parser.add_argument("--held-out", type=float, default=0.0, metavar="SHARE", help="share to evaluate on")
    parser.add_argument(
        "--share", type=facts, default=(), metavar="FACTS", help=f"of {', '.join(FACTS)}; comma-separated"
    )
    parser.add_argument(
        "--withhold-below",
        type=count,
        default=5,
        metavar="N",
        help="examples below which a class is not told",
    )
    for name, text in (
        ("histogram-noise", "epsilon of noise on the histogram, 0 for none"),
        ("statistics-noise", "multiplier of noise on the statistics, 0 for none"),
        ("feature-norm", "length to which features are clipped for it"),
    ):
        parser.add_argument(f"--{name}", type=at_least_zero, default=0.0, metavar="X", help=text)
    stay = parser.add_mutually_exclusive_group()
    stay.add_argument("--once", action="store_true", help="leave after one accepted update")
    stay.add_argument(
        "--check-in",
        type=seconds,
        metavar="SECONDS",
        help="one visit: work for at most so long if there is work, say when to come back, and leave",
    )
    parser.add_argument("--join-timeout", type=seconds, default=120.0, metavar="S", help="wait for a server")
    add_credentials(parser)


def count(text: str) -> int:
    """A whole number from 0, for argparse."""
    if int(text) < 0:
        raise ValueError
    return int(text)


FACTS = ("histogram", "descriptor", "feature", "statistics")


def facts(text: str) -> tuple[str, ...]:
    """What may leave the device, for argparse."""
    given = tuple(filter(None, text.split(",")))
    if not set(given) <= set(FACTS):
        raise ValueError
    return given


def at_least_zero(text: str) -> float:
    """A finite number from 0, for argparse."""
    if not 0 <= float(text) < 1e9:
        raise ValueError
    return float(text)


def seconds(text: str) -> float:
    """A finite time above 0, for argparse."""
    if not 0 < float(text) < 1e9:
        raise ValueError
    return float(text)


def _run_device(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    bundle = Bundle.read(options.bundle) if options.bundle else None
    data = load(options.data, input=bundle.manifest.input if bundle else None)
    client = EdgeClient(
        options.broker,
        fleet=options.fleet,
        data=data,
        work_dir=options.work_dir or _default_work_dir(options.fleet, options.id),
        device_id=options.id,
        bundle=options.bundle,
        engine=Engine(runtime=options.runtime, threads=options.threads, providers=options.provider),
        credentials=read_credentials(
            options.username, options.password_file, options.ca, options.cert, options.key
        ),
        held_out=options.held_out,
        sharing=Sharing(
            withhold_below=options.withhold_below,
            histogram_epsilon=options.histogram_noise,
            statistics_noise=options.statistics_noise,
            feature_norm=options.feature_norm,
            **dict.fromkeys(options.share, True),
        ),
        join_timeout=options.join_timeout,
    )
    stopped = stop_on_signals(client.stop)
    with client:
        if options.check_in is not None:
            visit = client.check_in(options.check_in)
            told = f"{visit.accepted} updates accepted, {_outlook(visit)}"
        else:
            told = f"{client.run(rounds=1 if options.once else None)} updates accepted"
    print(f"{client.device_id}: {told}")
    return 130 if stopped.is_set() else 0


def _outlook(visit: Visit) -> str:
    if visit.finished:
        return "the run is finished"
    return f"come back in {visit.come_back} s" if visit.come_back is not None else "come back any time"


def _default_work_dir(fleet: str, device: str | None) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    name = check_id(device) if device is not None else "default"
    return state / "edge-sdk" / check_id(fleet, "fleet") / name


def _configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="FILE.edge")


def _run_inspect(options: argparse.Namespace) -> int:
    bundle = Bundle.read(options.bundle)
    manifest = bundle.manifest
    channels, height, width = manifest.input.shape
    facts = [
        ("name", manifest.name),
        ("task", f"{manifest.task}, {manifest.classes} classes"),
        ("input", f"{channels}x{height}x{width} float32"),
        ("normalised by", f"mean {_listed(manifest.input.mean)}, deviation {_listed(manifest.input.std)}"),
        ("pipeline", _described(manifest.input)),
        ("class names", _listed(manifest.class_names) or "none"),
        ("features", str(manifest.feature_size)),
        ("head", ", ".join(manifest.head)),
        ("runtimes", ", ".join(sorted(manifest.runtimes))),
        ("options", _listed(manifest.options) or "none"),
        ("backbone", f"frozen, gives {_by(b.shape)} float32" if (b := manifest.backbone) else "none"),
        ("describes by", f"a hash of {d.dims} integers" if (d := manifest.describe) else "nothing"),
        ("weights", f"{len(manifest.parameters)} tensors, {manifest.nbytes:,} bytes"),
        ("sha256", bundle.sha256),
    ]
    _table(facts)
    print()
    rows = [(p.name, p.dtype, _by(p.shape) or "scalar", p.rule) for p in manifest.parameters]
    _table([("tensor", "dtype", "shape", "rule"), *rows])
    print()
    members = [(name, f"{m.size:,}", m.sha256[:16]) for name, m in sorted(manifest.members.items())]
    _table([("member", "bytes", "sha256"), *members])
    return 0


def _described(input: Input) -> str:
    if input.pipeline is None:
        return "none"
    steps = {
        "crop from {}x{}".format(*input.pipeline.size): input.image_shape != input.shape,
        "flip": input.pipeline.flip,
        "standardise": input.pipeline.standardise,
    }
    return ", ".join(step for step, taken in steps.items() if taken) or "none"


def _by(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


DEVICE = Command(
    "run a device: train on this machine's data when the fleet asks", _configure_device, _run_device
)
INSPECT = Command("show what is in a bundle", _configure_inspect, _run_inspect)
