"""``edge-sdk serve``, ``runs``, ``replay`` and ``broker-config``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.cli import Command
from edge_sdk.commands import add_credentials, read_credentials, stop_on_signals
from edge_sdk.data import load
from edge_sdk.errors import RunError
from edge_sdk.files import check_writable
from edge_sdk.tensors import decode
from edge_server.broker_config import SERVER, write_broker_config
from edge_server.config import make_config, read_toml
from edge_server.replay import replay
from edge_server.rounds import RoundResult
from edge_server.rows import RunRow
from edge_server.server import Server
from edge_server.store import Store

# Settings of the run that are options of the command; the TOML file takes these and all others.
_SETTINGS: dict[str, tuple[type, str]] = {
    "fleet": (str, "which devices are meant"),
    "rounds": (int, "aggregations until the run ends"),
    "strategy": (str, "fedavg, fedprox, fedavgm or fedadam"),
    "momentum": (float, "of fedavgm and fedadam, in [0, 1)"),
    "selection": (str, "random, or grouped: one device of each group of like data"),
    "descriptor": (str, "what devices are grouped by: hash or feature"),
    "chain": (int, "most devices behind one mediator, 0 for none"),
    "chain_passes": (int, "times that a mediator goes through its devices"),
    "augmentation": (float, "exponent by which rare classes are multiplied, 0 for none"),
    "calibration": (str, "none or ccvr: re-train the classifier at the end"),
    "covariance": (str, "that ccvr asks for: full, diagonal or low_rank"),
    "virtual_features": (int, "of each class, for ccvr"),
    "server_lr": (float, "learning rate of the server"),
    "mode": (str, "rounds, or buffered: devices work all the time"),
    "buffer": (int, "updates that make a model in the buffered mode"),
    "max_staleness": (int, "models that an update may be late in the buffered mode"),
    "over_selection": (float, "how many more are asked than waited for"),
    "min_devices": (int, "devices that must be there before a round"),
    "min_participants": (int, "updates without which a round is repeated"),
    "join_timeout": (float, "seconds for devices to come at the start"),
    "deadline": (float, "seconds for a round"),
    "grace": (float, "seconds for a lost device to come back"),
    "patience": (float, "seconds without a completed round after which the run stops"),
    "max_examples": (int, "the largest sample count of one device"),
    "chunk_bytes": (int, "of tensors in one message"),
    "epochs": (int, "local epochs"),
    "batch_size": (int, "local batch size"),
    "lr": (float, "local learning rate"),
    "weight_decay": (float, "of local training"),
    "local_momentum": (float, "of the devices' SGD, in [0, 1)"),
    "proximal": (float, "of FedProx"),
    "clip_norm": (float, "largest norm of a local gradient"),
    "schedule": (str, "of the learning rate: constant, exponential or cosine"),
    "decay": (float, "of the exponential schedule, a round"),
    "aggregation": (str, "of updates: mean, median or trimmed_mean"),
    "max_norm": (float, "largest norm of an update, 0 for no bound"),
    "over_norm": (str, "refuse or clip an update that is longer"),
    "noise_multiplier": (float, "of noise on the sum of clipped updates, 0 for none"),
    "delta": (float, "for which epsilon is stated"),
    "codec": (str, "of updates: fp32, fp16 or int8"),
    "compression": (str, "of updates: none or zstd"),
    "evaluation": (str, "server, devices or none"),
    "keep_rounds": (int, "of which --keep-updates keeps updates, 0 for all"),
    "keep_bytes": (int, "of updates of the last rounds that --keep-updates keeps, 0 for all"),
    "seed": (int, "of selection and shuffles"),
}


def _configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", metavar="F.edge", help="what the devices train")
    parser.add_argument("--broker", metavar="URL", help="mqtt://HOST[:PORT] or mqtts://…")
    parser.add_argument("--participants", type=_count_or_share, metavar="N|FRACTION", help="devices a round")
    for name, (kind, text) in _SETTINGS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=text
        )
    parser.add_argument("--keep-updates", action="store_const", const=True, help="keep them, for replay")
    parser.add_argument("--eval-data", metavar="PATH", help="labelled data to evaluate every model on")
    parser.add_argument(
        "--no-retain",
        dest="retain",
        action="store_const",
        const=False,
        help="for a broker that keeps no retained messages and has no MQTT 5 to say so",
    )
    parser.add_argument("--config", type=Path, metavar="F.toml", help="all of this in a file; options win")
    parser.add_argument("--work-dir", metavar="DIR", help="durable state (default: edge-runs/FLEET)")
    parser.add_argument("--store", metavar="URL", help="another database than SQLite in --work-dir")
    parser.add_argument("--out", metavar="F.edge", help="the trained bundle (default: in --work-dir)")
    add_credentials(parser)


_CREDENTIALS = ("username", "password_file", "ca", "cert", "key")
_OUTSIDE = ("bundle", "broker", "eval_data", "work_dir", "store", "out", *_CREDENTIALS)


def _run_serve(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    values: dict[str, Any] = read_toml(options.config) if options.config else {}
    for name in (*_OUTSIDE, *_SETTINGS, "participants", "keep_updates", "retain"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    outside = {name: values.pop(name, None) for name in _OUTSIDE}
    retain = values.pop("retain", True)
    if not isinstance(retain, bool):
        raise RunError(f"retain in the --config file is {retain!r}: give true or false")
    for name, value in outside.items():
        if value is not None and not isinstance(value, str | Path):
            raise RunError(f"{name} in the --config file is {value!r}: give a text")
    for name in ("bundle", "broker"):
        if outside[name] is None:
            raise RunError(f"no {name} is given: use --{name}, or {name} in the --config file")
    if "evaluation" not in values and outside["eval_data"] is None:
        values["evaluation"] = "none"
    config = make_config(values)
    if config.evaluation == "server" and outside["eval_data"] is None:
        raise RunError("evaluation on the server needs --eval-data")
    work_dir = Path(outside["work_dir"] or Path("edge-runs") / config.fleet)
    out = Path(outside["out"] or work_dir / "trained.edge")
    check_writable(out)
    bundle = Bundle.read(outside["bundle"])
    eval_data = (
        load(outside["eval_data"], split="test", input=bundle.manifest.input)
        if outside["eval_data"]
        else None
    )
    server = Server(
        bundle,
        config,
        broker=outside["broker"],
        work_dir=work_dir,
        store=outside["store"],
        eval_data=eval_data,
        credentials=read_credentials(**{name: outside[name] for name in _CREDENTIALS}),
        retain=retain,
        on_round=lambda result: print(format_round(result, config.rounds), flush=True),
        on_status=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    effective = config.make_strategy().effective_learning_rate(config.lr)
    if effective is not None and effective != config.lr:
        print(
            f"learning rate {config.lr:g}, effective {effective:g} by the server's momentum", file=sys.stderr
        )
    stop_on_signals(server.stop)
    outcome = server.run()
    if not outcome.finished:
        print("stopped; the same command goes on with this run", file=sys.stderr)
        return 130
    outcome.bundle.write(out)
    if outcome.rounds and (spent := outcome.rounds[-1].epsilon) is not None:
        print(f"what the models tell of one device: ε {spent:.2f} at δ {config.delta:g}")
    print(f"wrote {out}")
    return 0


def format_round(result: RoundResult, rounds: int) -> str:
    """A round's line for a terminal.

    >>> format_round(RoundResult(3, 0, 0.5, 1.25, 4, 400, 2048, 4096, 1.5), 10)
    'round  3/10  accuracy 50.00 %  loss 1.250  4 devices  ↑2 ↓4 KB  1.5 s'
    """
    figures = ""
    if result.accuracy is not None and result.loss is not None:
        figures = f"accuracy {100 * result.accuracy:5.2f} %  loss {result.loss:.3f}  "
    which = "calibrated" if result.calibrated else f"round {result.round:>{len(str(rounds))}}/{rounds}"
    spent = f"  ε {result.epsilon:.2f}" if result.epsilon is not None else ""
    chains = f" in {result.chains} chain{'s' * (result.chains != 1)}" if result.chains else ""
    return (
        f"{which}  {figures}"
        f"{result.participants} device{'s' * (result.participants != 1)}{chains}  "
        f"↑{result.bytes_up / 1024:.0f} ↓{result.bytes_down / 1024:.0f} KB  {result.seconds:.1f} s{spent}"
    )


def _configure_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="of the server")
    parser.add_argument("--store", metavar="URL", help="its other database, if it has one")
    parser.add_argument("--run", dest="run_id", metavar="ID", help="begins its id (default: the last)")


def _configure_runs(parser: argparse.ArgumentParser) -> None:
    _configure_store(parser)
    parser.add_argument("--out", type=Path, metavar="F.edge", help="write the present model of --run")


def _run_runs(options: argparse.Namespace) -> int:
    with closing(_existing_store(options)) as store:
        for run in store.runs():
            status = "ended" if run.ended else "unfinished"
            begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
            rounds = f"{run.round}/{run.config.rounds}"
            how = f"{run.config.strategy}  {run.config.mode}"
            print(f"{run.id[:12]}  {begun}  {run.fleet}  {how}  {rounds}  {status}")
        if options.out is not None:
            run = _chosen(store, options)
            bundle = Bundle.read(store.blob(run.bundle))
            weights = decode(store.blob(run.model), bundle.manifest.specs)
            bundle.with_weights(weights).write(options.out)
            print(f"wrote {options.out}")
    return 0


def _run_replay(options: argparse.Namespace) -> int:
    differing, first = 0, True
    with closing(_existing_store(options)) as store:
        for replayed in replay(store, _chosen(store, options)):
            if first and replayed.round > 1:
                print(f"the updates before round {replayed.round} are forgotten: replay begins there")
            first = False
            differing += not replayed.same
            verdict = "same bits" if replayed.same else "DIFFERS"
            model = replayed.recomputed[:16]
            print(f"round {replayed.round}  {replayed.participants} updates  {model}  {verdict}")
    return 1 if differing else 0


def _chosen(store: Store, options: argparse.Namespace) -> RunRow:
    """The run whose id begins with ``--run``; the last one by default."""
    runs = [run for run in store.runs() if run.id.startswith(options.run_id or "")]
    if not runs or (options.run_id and len(runs) > 1):
        wanted = f" whose id begins with {options.run_id}" if options.run_id else ""
        place = "this database" if options.store is not None else options.work_dir
        raise RunError(f"there is no one run in {place}{wanted}: see 'edge-sdk runs'")
    return runs[-1]


def _existing_store(options: argparse.Namespace) -> Store:
    if options.store is None:
        if options.work_dir is None:
            raise RunError("no store is given: use --work-dir DIR, or --store URL for another database")
        if not (options.work_dir / "edge.sqlite").exists():
            raise RunError(f"there is no run in {options.work_dir}")
    return Store(options.work_dir or Path(), options.store, exclusive=False)


def _configure_broker_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fleet", required=True, metavar="F")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tls", action="store_true", help="TLS, with a certificate for each device")
    parser.add_argument(
        "--passwords", action="store_true", help="with --tls: logins in place of those certificates"
    )


def _run_broker_config(options: argparse.Namespace) -> int:
    passwords = options.passwords or not options.tls
    files = write_broker_config(options.out, fleet=options.fleet, tls=options.tls, passwords=passwords)
    for file in files:
        print(f"wrote {file}")
    folder = options.out.resolve()
    if options.tls:
        needed = "broker.crt and broker.key" if passwords else "ca.crt, broker.crt and broker.key"
        print(f"put {needed} into {folder}; who has signed broker.crt is the --ca of server and devices")
    if not passwords:
        print(f"the server's common name is '{SERVER}', a device's is its id")
    else:
        print(f"add logins: mosquitto_passwd -c {folder / 'passwords'} {SERVER}; then one for each device id")
    print(f"start it: mosquitto -c {folder / 'mosquitto.conf'}")
    return 0


def _count_or_share(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


SERVE = Command("run the server: rounds over a fleet, to a trained bundle", _configure_serve, _run_serve)
RUNS = Command("list the runs in a work folder or a database", _configure_runs, _run_runs)
REPLAY = Command("recompute a run's models from its kept updates", _configure_store, _run_replay)
BROKER_CONFIG = Command(
    "write a mosquitto configuration with an ACL", _configure_broker_config, _run_broker_config
)
