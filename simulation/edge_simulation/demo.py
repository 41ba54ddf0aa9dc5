"""The main job, from a PyTorch module to a better model: FedAvg and FedAvgM on the same split and seed."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from edge_sdk.bundle import Bundle
from edge_sdk.errors import EdgeError, RunError
from edge_sdk.files import check_writable, write_atomically
from edge_sdk.runtime import check_runtime
from edge_server import Outcome, RoundResult, RunConfig, Server
from edge_server.commands import format_round
from edge_simulation.broker import EmbeddedBroker
from edge_simulation.datasets import TrainTest, load_train_test
from edge_simulation.fleet import DeviceProcesses
from edge_simulation.partition import Partition, dirichlet_hsu
from edge_simulation.report import Report, RunResult, summary, write_report

SHARE = 300
"""Most images on one device, so that the demo stays a matter of minutes on any data set."""
TEST = 2000
"""Most images that a model is evaluated on."""
BATCH = 8
SMALL = 16 * 16
"""Pixels of an image up to which it trains as the digits do."""
MEAN, STD = 0.3, 0.35
"""Normalisation of the grey digits and clothes; close enough for photographs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A strategy with its own best learning rate.

    ``lr`` is that on the digits, out of 0.02, 0.05 and 0.1; ``lr_large`` that on Fashion-MNIST, out of
    0.01, 0.02 and 0.05, which larger images get.
    """

    label: str
    strategy: str
    lr: float
    lr_large: float
    momentum: float = 0.0

    def lr_for(self, data: TrainTest) -> float:
        """The learning rate on ``data``."""
        _, height, width = data.input_shape
        return self.lr if height * width <= SMALL else self.lr_large


CONTENDERS = (
    Contender(label="FedAvg", strategy="fedavg", lr=0.1, lr_large=0.05),
    Contender(label="FedAvgM", strategy="fedavgm", lr=0.05, lr_large=0.02, momentum=0.9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What to show.

    Attributes:
        data: a name or a path; see :func:`edge_simulation.datasets.load_train_test`.
        devices: processes to start; half of them take part in a round.
        alpha: concentration of the Dirichlet split, 0 for one class a device.
        broker: URL of a broker; an embedded one is started where it is None.
        port: of the embedded broker; 0 takes a free one.
        out: where the report, the summary and the models go.
    """

    data: str = "digits"
    data_dir: Path | None = None
    devices: int = 12
    rounds: int = 40
    alpha: float = 0.1
    seed: int = 0
    broker: str | None = None
    port: int = 0
    runtime: str = "onnx"
    out: Path = Path("demo-out")


def run_demo(demo: Demo, console: Console) -> None:
    """Run the demo to its end; a KeyboardInterrupt ends what was started.

    Raises:
        EdgeError: an option, the data, the broker, a device or the server fails; says which.
    """
    _check(demo)
    data = _within_budget(load_train_test(demo.data, demo.data_dir, demo.seed), demo)
    share = min(len(data.train) // demo.devices, SHARE)
    partition = dirichlet_hsu(
        data.train.labels, devices=demo.devices, alpha=demo.alpha, seed=demo.seed, share=share
    )
    names = [f"device-{i:02d}" for i in range(demo.devices)]
    console.print(
        f"[bold]{data.name}[/]: {share} images on each of {demo.devices} devices, Dirichlet "
        f"concentration {demo.alpha:g}, {len(data.test)} held out, seed {demo.seed}"
    )
    with contextlib.ExitStack() as stack:
        url = demo.broker or stack.enter_context(EmbeddedBroker(demo.port)).url
        with console.status("exporting the model (PyTorch is needed here, and nowhere after)"):
            bundle = _export(data, demo.seed, demo.runtime)
        console.print(f"exported {bundle.manifest.name}: {bundle.manifest.nbytes:,} bytes of weights")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-demo-")))
        results, outcomes = [], []
        for contender in CONTENDERS:
            outcome = _contend(contender, demo, data, partition, names, bundle, url, folder, console)
            outcomes.append(outcome)
            results.append(_result(contender, data, outcome))
    report = Report(
        title="A fleet learns",
        data_name=data.name,
        devices=demo.devices,
        alpha=demo.alpha,
        seed=demo.seed,
        class_names=data.class_names,
        histogram=partition.histogram(data.train.labels, data.classes),
        runs=tuple(results),
        device_names=tuple(names),
    )
    _write(demo.out, report, outcomes[-1].bundle)
    _compare(report, console)
    console.print(f"wrote report.html, summary.json, model.edge and model.onnx to [bold]{demo.out}[/]")


def _check(demo: Demo) -> None:
    """RunError, or EdgeError, for what would otherwise show only after minutes."""
    if demo.devices < 2:
        raise RunError(f"a fleet of {demo.devices} is none: give --devices 2 or more")
    if demo.rounds < 1:
        raise RunError(f"{demo.rounds} rounds are none: give --rounds 1 or more")
    if demo.seed < 0:
        raise RunError(f"the seed is {demo.seed}: give a --seed of 0 or more")
    if not demo.alpha >= 0:
        raise RunError(f"the concentration is {demo.alpha}: give an --alpha from 0 to inf")
    check_runtime(demo.runtime)
    check_writable(demo.out / "report.html")


def _within_budget(data: TrainTest, demo: Demo) -> TrainTest:
    """The same data with at most TEST images held out."""
    if len(data.train) < demo.devices:
        raise RunError(f"{len(data.train)} images cannot be shared among {demo.devices} devices")
    if len(data.test) <= TEST:
        return data
    chosen = np.sort(np.random.default_rng(demo.seed).permutation(len(data.test))[:TEST])
    return replace(data, test=data.test.take(chosen))


def _export(data: TrainTest, seed: int, runtime: str) -> Bundle:
    from edge_export import export_bundle
    from edge_export.models import make_cnn

    channels = data.input_shape[0]
    return export_bundle(
        make_cnn(data.input_shape, data.classes, seed=seed),
        data.input_shape,
        classes=data.classes,
        class_names=data.class_names,
        mean=[MEAN] * channels,
        std=[STD] * channels,
        # The server evaluates with ONNX Runtime.
        runtimes={"onnx", runtime},
        batch=BATCH,
    )


def _contend(
    contender: Contender,
    demo: Demo,
    data: TrainTest,
    partition: Partition,
    names: list[str],
    bundle: Bundle,
    url: str,
    folder: Path,
    console: Console,
) -> Outcome:
    """One run over the wire: devices as processes, the server here."""
    config = RunConfig(
        # On a broker that others use too, two demos must not meet.
        fleet=f"demo-{contender.strategy}-{secrets.token_hex(4)}",
        rounds=demo.rounds,
        strategy=contender.strategy,  # type: ignore[arg-type]
        momentum=contender.momentum,
        participants=max(demo.devices // 2, 1),
        min_devices=demo.devices,
        lr=contender.lr_for(data),
        batch_size=BATCH,
        seed=demo.seed,
    )
    progress = Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task(contender.label, total=demo.rounds, accuracy="starting devices")

    def on_round(result: RoundResult) -> None:
        # Without the word, the line fits a terminal of 80 columns.
        line = format_round(result, demo.rounds).removeprefix("round ")
        progress.console.print(f"{contender.label:<8} {line}", highlight=False)
        accuracy = "" if result.accuracy is None else f"{100 * result.accuracy:.1f} %"
        progress.update(task, completed=result.round, accuracy=accuracy)

    server = Server(
        bundle,
        config,
        broker=url,
        work_dir=folder / contender.strategy / "server",
        eval_data=data.test,
        on_round=on_round,
        on_status=lambda sentence: progress.console.print(f"[dim]{sentence}[/]"),
    )
    shares = [data.train.take(indices) for indices in partition.indices]
    devices = DeviceProcesses(
        shares,
        names,
        broker=url,
        fleet=config.fleet,
        folder=folder / contender.strategy,
        runtime=demo.runtime,
    )
    with progress, devices, _watch(devices, server) as failures:
        outcome = server.run()
        if failures:
            raise failures[0]
        devices.wait(10)
    return outcome


@contextlib.contextmanager
def _watch(devices: DeviceProcesses, server: Server) -> Iterator[list[EdgeError]]:
    """Stop the server when a device fails; the failure is in the list then."""
    failures: list[EdgeError] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            try:
                devices.check()
            except EdgeError as error:
                failures.append(error)
                server.stop()
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield failures
    finally:
        over.set()
        watcher.join()


def _result(contender: Contender, data: TrainTest, outcome: Outcome) -> RunResult:
    evaluation = outcome.evaluation
    assert evaluation is not None
    assert evaluation.confusion is not None
    settings = {"local learning rate": f"{contender.lr_for(data):g}", "local epochs": "1", "batch": "8"}
    if contender.momentum:
        settings["server momentum"] = f"{contender.momentum:g}"
    return RunResult(contender.label, settings, outcome.rounds, evaluation.confusion)


def _write(out: Path, report: Report, bundle: Bundle) -> None:
    from edge_export import inference_onnx

    out.mkdir(parents=True, exist_ok=True)
    bundle.write(out / "model.edge")
    write_atomically(out / "model.onnx", inference_onnx(bundle))
    write_atomically(out / "summary.json", json.dumps(summary(report), indent=1).encode())
    write_report(out / "report.html", report)


def _compare(report: Report, console: Console) -> None:
    table = Table(
        "",
        "final accuracy",
        "best",
        "last loss",
        "MB up",
        "MB down",
        "seconds",
        title="Same split, same seed",
    )
    for run in report.runs:
        accuracies = [r.accuracy for r in run.rounds if r.accuracy is not None]
        table.add_row(
            run.label,
            f"{100 * accuracies[-1]:.2f} %",
            f"{100 * max(accuracies):.2f} %",
            f"{run.rounds[-1].loss:.3f}",
            f"{sum(r.bytes_up for r in run.rounds) / 1e6:.1f}",
            f"{sum(r.bytes_down for r in run.rounds) / 1e6:.1f}",
            f"{run.seconds:.0f}",
        )
    console.print(table)
