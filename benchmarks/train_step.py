"""The training step in ONNX Runtime and ExecuTorch against PyTorch eager: time, memory, exactness, size.

    python benchmarks/train_step.py [--quick] [--only MODEL] [--json PATH]

Each model is exported once, for both runtimes. Then every measurement runs in a process of its own, the
runtimes in turn, because the worker threads of each slow down the others where they share a process; the
fastest step of each counts. Two threads each. Figures, smaller is better but for the stock path's:

- ``onnx_over_eager.*``, ``executorch_over_eager.*``: time of a step, over PyTorch's;
- ``onnx_rss_over_eager.*``, ``executorch_rss_over_eager.*``: peak memory of the whole process, likewise
  (ExecuTorch's wheel brings PyTorch into its process);
- ``grad_error.*``, ``executorch_grad_error.*``: how far the weights are from those of a float64 run after 50
  steps on the same batches (20 with --quick), over how far PyTorch's float32 is (the norm over all weights);
- ``loss_gap.*``, ``executorch_loss_gap.*``: difference of the mean training loss over the last 20 of 200
  steps on Fashion-MNIST (10 of 20 with --quick), in per cent of PyTorch's; ``nudged_loss_gap.*``: the same of
  PyTorch itself from weights 1e-7 larger, which is what rounding alone does;
- ``settled_loss_gap.*``, ``executorch_settled_loss_gap.*``, ``nudged_settled_loss_gap.*``: the same of the
  last 100 of 200 steps at a tenth of the rate, from where PyTorch is after 1000 steps, for MobileNetV2: from
  random weights rounding decides where it goes;
- ``stock_over_executorch.cnn``: time of ExecuTorch's own joint graph over ours; ``stock_wrong_at.cnn``: the
  step at which its loss is first a tenth away from PyTorch's on the same batches;
- ``step_bytes.*``, ``executorch_bytes.*``: the ONNX train program, ExecuTorch's four in one file;
  ``export_seconds.*``, ``executorch_export_seconds.*``: of MobileNetV2 at 32 px.

The models: a CNN (two 5x5 convolutions, 512 units), a BatchNorm and depthwise net, MobileNetV2 (width 1.0) at
32 and 96 pixels, and the head of a model whose backbone is frozen (4096-512-10). ``--quick`` leaves out
MobileNetV2 at 96 px, the stock path, and the loss curves but the CNN's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from step.cases import CASES, THREADS, batches, whole_model
from step.steppers import settle, stepper

RUNTIMES = ("onnx", "executorch")
PREFIX = {"onnx": "", "executorch": "executorch_", "nudged": "nudged_"}


def run_export(name: str, folder: str) -> dict[str, float]:
    from edge_export import export_bundle

    case = CASES[name]
    began = {"": time.perf_counter()}
    told = logging.Handler(logging.INFO)
    told.emit = lambda record: began.setdefault(  # type: ignore[method-assign]
        record.getMessage().partition(":")[0], time.perf_counter()
    )
    logging.getLogger("edge_export").addHandler(told)
    logging.getLogger("edge_export").setLevel(logging.INFO)
    bundle = export_bundle(
        whole_model(name),
        case.images,
        classes=10,
        name=name,
        runtimes=RUNTIMES,
        batch=case.batch,
        head_only=case.head_only,
    )
    end, second = time.perf_counter(), began["ExecuTorch"]
    bundle.write(Path(folder) / f"{name}.edge")
    sizes = {runtime: len(bundle.program(runtime, "train")) for runtime in RUNTIMES}
    return {
        "export_seconds": second - began[""],
        "executorch_export_seconds": end - second,
        "step_bytes": sizes["onnx"],
        "executorch_bytes": sizes["executorch"],
    }


def run_time(kind: str, name: str, folder: str, steps: int) -> dict[str, float]:
    step, _ = stepper(kind, name, folder)
    case = CASES[name]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((case.batch, *case.shape), np.float32)
    y = generator.integers(10, size=case.batch)
    times = []
    for count in range(steps + 3):
        start = time.perf_counter()
        step(x, y)
        if count >= 3:
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": min(times) * 1e3, "rss": peak}


def run_loss(
    kind: str, name: str, folder: str, steps: int, start: str | None = None
) -> dict[str, list[float]]:
    step, _ = stepper(kind, name, folder, start)
    return {"losses": [step(x, y) for x, y in batches(CASES[name], steps)]}


def run_settle(name: str, start: str) -> None:
    settle(name, start)


def run_error(name: str, folder: str, steps: int) -> dict[str, float]:
    made = {kind: stepper(kind, name, folder) for kind in ("exact", "eager", *RUNTIMES)}
    for x, y in batches(CASES[name], steps):
        for one in made.values():
            one.step(x, y)
    weights = {kind: one.weights() for kind, one in made.items()}

    def distance(kind: str) -> float:
        return float(
            np.sqrt(sum(((weights[kind][key] - exact) ** 2).sum() for key, exact in weights["exact"].items()))
        )

    return {kind: distance(kind) / distance("eager") for kind in RUNTIMES}


def in_process(what: str, *arguments: object) -> dict[str, Any]:
    """``run_<what>(*arguments)`` in a new process."""
    command = [sys.executable, __file__, "--run", json.dumps([what, *arguments])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{what} {arguments} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- the report ----------------------------------------------------------------------------------------


def measure(name: str, folder: str, quick: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The figures of one model, and its loss curves."""
    case = CASES[name]
    exported = in_process("export", name, folder)
    rounds, steps = (1, 6) if quick else (5, case.steps)
    blocks: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("eager", *RUNTIMES)}
    for _ in range(rounds):
        for kind, seen in blocks.items():
            seen.append(in_process("time", kind, name, folder, steps))
    ms = {kind: min(block["ms"] for block in seen) for kind, seen in blocks.items()}
    memory = {kind: max(block["rss"] for block in seen) for kind, seen in blocks.items()}
    print(
        f"{name:16s}", *(f"{kind} {ms[kind]:.2f} ms {memory[kind]:.0f} MB  " for kind in blocks), flush=True
    )
    figures = {
        f"{key}.{name}": value
        for key, value in exported.items()
        if "seconds" not in key or name == "mobilenet_v2_32"
    }
    errors = in_process("error", name, folder, 20 if quick else 50)
    for kind in RUNTIMES:
        figures |= {
            f"{kind}_over_eager.{name}": ms[kind] / ms["eager"],
            f"{kind}_rss_over_eager.{name}": memory[kind] / memory["eager"],
            f"{PREFIX[kind]}grad_error.{name}": errors[kind],
        }
    if name == "cnn" and not quick:
        figures |= against_stock(name, folder, ms["executorch"])
    curves: dict[str, list[float]] = {}
    if name == "cnn" or not quick:
        last, steps = (10, 20) if quick else (20, 200)
        figures |= loss_gaps(curves, "", last, name, folder, steps)
    if case.settles and not quick:
        start = str(Path(folder) / f"{name}.npz")
        in_process("settle", name, start)
        figures |= loss_gaps(curves, "settled_", 100, name, folder, 200, start)
    return figures, curves


def loss_gaps(
    curves: dict[str, list[float]], which: str, last: int, name: str, *rest: object
) -> dict[str, float]:
    """How far the mean of the ``last`` losses is from PyTorch's, in per cent; ``curves`` get all of them."""
    made = {kind: in_process("loss", kind, name, *rest)["losses"] for kind in ("eager", *PREFIX)}
    curves |= {which + kind: losses for kind, losses in made.items()}
    means = {kind: np.mean(losses[-last:]) for kind, losses in made.items()}
    return {
        f"{prefix}{which}loss_gap.{name}": float(abs(means[kind] / means["eager"] - 1)) * 100
        for kind, prefix in PREFIX.items()
    }


def against_stock(name: str, folder: str, ms: float) -> dict[str, float]:
    """Four steps are timed: the first of them takes no longer than the last."""
    timed = in_process("time", "stock", name, folder, 1)
    stock, eager = (in_process("loss", kind, name, folder, 10)["losses"] for kind in ("stock", "eager"))
    print(f"{name:16s} stock {timed['ms']:.0f} ms {timed['rss']:.0f} MB; losses", end=" ")
    print(" ".join(f"{loss:.3f}" for loss in stock), "PyTorch's", " ".join(f"{loss:.3f}" for loss in eager))
    return {
        f"stock_over_executorch.{name}": timed["ms"] / ms,
        f"stock_wrong_at.{name}": wrong_at(stock, eager),
    }


def wrong_at(losses: list[float], exact: list[float]) -> float:
    """The step, from 1 on, whose loss is first more than a tenth away; infinity if none is."""
    for step, (loss, right) in enumerate(zip(losses, exact, strict=True), start=1):
        if not abs(loss - right) <= right / 10:
            return step
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps: a check that it runs")
    parser.add_argument("--only", choices=CASES, help="one model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        what, *arguments = json.loads(options.run)
        print(json.dumps(globals()[f"run_{what}"](*arguments)))
        return
    figures: dict[str, float] = {}
    curves: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        wanted = [name for name in CASES if not (options.quick and name == "mobilenet_v2_96")]
        for name in [options.only] if options.only else wanted:
            of_model, curves[name] = measure(name, folder, options.quick)
            figures |= of_model
    for key, value in figures.items():
        print(f"{key:44s} {value:12.4g}")
    if options.json:
        budget = "1 process of 6 steps each" if options.quick else "5 processes of 8 to 200 steps each"
        machine = f"{cpu_name()}, {os.cpu_count()} cores, {THREADS} threads, {versions()}"
        report = {"figures": figures, "budget": f"{budget}, fastest step", "machine": machine}
        report["losses"] = {name: rounded(of_model) for name, of_model in curves.items() if of_model}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def rounded(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    return {kind: [round(loss, 4) for loss in losses] for kind, losses in curves.items()}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in ("torch", "onnxruntime", "executorch"))


if __name__ == "__main__":
    main()
