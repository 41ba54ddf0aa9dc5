"""The training step in ONNX Runtime against PyTorch eager: time, memory, exactness, size.

    python benchmarks/train_step.py [--quick] [--json PATH]

Each model is exported once. Then every measurement runs in a process of its own, PyTorch's and ONNX
Runtime's in turn, because the worker threads of either slow down the other where they share a process; the
fastest step of each counts. Two threads each. Figures, smaller is better:

- ``onnx_over_eager.*``: time of a step, ONNX Runtime's over PyTorch's;
- ``onnx_rss_over_eager.*``: peak memory of the whole process, likewise;
- ``grad_error.*``: how far the weights are from those of a float64 run after 50 steps on the same batches (20
  with --quick), over how far PyTorch's float32 is (the norm over all weights);
- ``loss_gap.*``: difference of the mean training loss over the last 20 of 200 steps on Fashion-MNIST (10
  of 20 with --quick), in per cent of PyTorch's;
- ``step_bytes.*``, ``export_seconds.*``: of MobileNetV2's train program for 32 x 32 images.

``--quick`` leaves out MobileNetV2 at 96 px, and the loss curves but the CNN's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
LR = 0.01
DATA = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))


@dataclass(frozen=True)
class Case:
    """One model: how it is made, the pixels a side of its images, the batch, timed steps in a process."""

    make: Callable[[], Any]
    size: int
    batch: int
    steps: int


def cnn() -> Any:
    from edge_export.models import WideCNN

    return WideCNN()


def bn_dw() -> Any:
    """BatchNorm, ReLU6, depthwise and 1x1 convolutions on large maps: MobileNet's first half, wider."""
    from torch import nn

    def block(entering: int, leaving: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
        convolution = nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(leaving), nn.ReLU6())

    return nn.Sequential(
        block(3, 32, 3),
        *(block(32, 32, 3, groups=32), block(32, 64, 1)),
        *(block(64, 64, 3, stride=2, groups=64), block(64, 128, 1)),
        *(block(128, 128, 3, groups=128), block(128, 128, 1)),
        *(block(128, 128, 3, stride=2, groups=128), block(128, 256, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
    )


def mobilenet_v2() -> Any:
    from edge_export.models import MobileNetV2

    # Without dropout: the two runtimes would draw different masks.
    return MobileNetV2(dropout=0.0)


CASES = {
    "cnn": Case(cnn, 32, 50, 20),
    "bn_dw": Case(bn_dw, 32, 32, 12),
    "mobilenet_v2_32": Case(mobilenet_v2, 32, 32, 12),
    "mobilenet_v2_96": Case(mobilenet_v2, 96, 16, 8),
}


def batches(case: Case, count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of Fashion-MNIST as three equal channels, enlarged by repetition or padded to the size."""
    from edge_sdk.data import load

    dataset: Any = load(DATA)
    images, labels = dataset.images, dataset.labels
    generator = np.random.default_rng(seed)
    for _ in range(count):
        chosen = generator.choice(len(labels), case.batch, replace=False)
        x = images[chosen].astype(np.float32).reshape(-1, 1, 28, 28) / 255
        x = (x - 0.286) / 0.353
        x = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2))).repeat(case.size // 32, 2).repeat(case.size // 32, 3)
        yield np.ascontiguousarray(x.repeat(3, 1)), labels[chosen].astype(np.int64)


def make_model(name: str) -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    return CASES[name].make()


# --- what the processes do -----------------------------------------------------------------------------


def eager_stepper(
    name: str, dtype: str = "float32"
) -> tuple[Callable[[Any, Any], float], Callable[[], dict]]:
    import torch
    from torch.nn import functional

    model = make_model(name).to(getattr(torch, dtype)).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        optimiser.zero_grad()
        logits = model(torch.from_numpy(x).to(getattr(torch, dtype)))
        loss = functional.cross_entropy(logits, torch.from_numpy(y))
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step, lambda: {key: p.detach().double().numpy() for key, p in model.named_parameters()}


def onnx_stepper(bundle: str) -> tuple[Callable[[Any, Any], float], Callable[[], dict]]:
    from edge_sdk import Bundle
    from edge_sdk.runtime import Optimiser, open_runtime

    opened = Bundle.read(Path(bundle))
    runtime = open_runtime(opened, threads=THREADS)
    sgd = Optimiser(lr=LR)
    trained = {spec.name for spec in opened.manifest.trainable}

    def step(x: np.ndarray, y: np.ndarray) -> float:
        return runtime.train_step(x, y, np.ones(len(y), np.float32), sgd).loss / len(y)

    def weights() -> dict:
        return {key: a.astype(np.float64) for key, a in runtime.get_weights().items() if key in trained}

    return step, weights


def run_export(name: str, folder: str) -> dict[str, float]:
    from edge_export import export_bundle

    model, case = make_model(name), CASES[name]
    start = time.perf_counter()
    bundle = export_bundle(model, (3, case.size, case.size), classes=10, name=name)
    seconds = time.perf_counter() - start
    bundle.write(Path(folder) / f"{name}.edge")
    return {"export_seconds": seconds, "step_bytes": len(bundle.program("onnx", "train"))}


def run_time(kind: str, name: str, folder: str, steps: int) -> dict[str, float]:
    step, _ = eager_stepper(name) if kind == "eager" else onnx_stepper(f"{folder}/{name}.edge")
    case = CASES[name]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((case.batch, 3, case.size, case.size), np.float32)
    y = generator.integers(10, size=case.batch)
    times = []
    for count in range(steps + 3):
        start = time.perf_counter()
        step(x, y)
        if count >= 3:
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": min(times) * 1e3, "rss": peak}


def run_loss(kind: str, name: str, folder: str, steps: int) -> dict[str, list[float]]:
    step, _ = eager_stepper(name) if kind == "eager" else onnx_stepper(f"{folder}/{name}.edge")
    return {"losses": [step(x, y) for x, y in batches(CASES[name], steps)]}


def run_error(name: str, folder: str, steps: int) -> dict[str, float]:
    made = {
        "exact": eager_stepper(name, "float64"),
        "eager": eager_stepper(name),
        "onnx": onnx_stepper(f"{folder}/{name}.edge"),
    }
    for x, y in batches(CASES[name], steps):
        for step, _ in made.values():
            step(x, y)
    weights = {kind: get() for kind, (_, get) in made.items()}

    def distance(kind: str) -> float:
        return float(
            np.sqrt(sum(((weights[kind][key] - exact) ** 2).sum() for key, exact in weights["exact"].items()))
        )

    return {"ratio": distance("onnx") / distance("eager"), "eager": distance("eager")}


def in_process(what: str, *arguments: object) -> dict[str, Any]:
    """``run_<what>(*arguments)`` in a new process."""
    command = [sys.executable, __file__, "--run", json.dumps([what, *arguments])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{what} {arguments} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- the report ----------------------------------------------------------------------------------------


def measure(name: str, folder: str, quick: bool) -> dict[str, float]:
    case = CASES[name]
    exported = in_process("export", name, folder)
    rounds, steps = (1, 6) if quick else (5, case.steps)
    blocks: dict[str, list[dict[str, float]]] = {"eager": [], "onnx": []}
    for _ in range(rounds):
        for kind, seen in blocks.items():
            seen.append(in_process("time", kind, name, folder, steps))
    eager, onnx = (min(block["ms"] for block in blocks[kind]) for kind in ("eager", "onnx"))
    memory = {kind: max(block["rss"] for block in seen) for kind, seen in blocks.items()}
    print(f"{name:16s} PyTorch {eager:7.1f} ms {memory['eager']:5.0f} MB   "
          f"ONNX Runtime {onnx:7.1f} ms {memory['onnx']:5.0f} MB", flush=True)  # fmt: skip
    figures = {
        f"onnx_over_eager.{name}": onnx / eager,
        f"onnx_rss_over_eager.{name}": memory["onnx"] / memory["eager"],
        f"grad_error.{name}": in_process("error", name, folder, 20 if quick else 50)["ratio"],
    }
    if name == "mobilenet_v2_32":
        figures |= {f"{key}.{name}": value for key, value in exported.items()}
    if name == "cnn" or (not quick and name != "mobilenet_v2_96"):
        last, steps = (10, 20) if quick else (20, 200)
        losses = [
            np.mean(in_process("loss", kind, name, folder, steps)["losses"][-last:])
            for kind in ("eager", "onnx")
        ]
        figures[f"loss_gap.{name}"] = abs(losses[1] / losses[0] - 1) * 100
    return figures


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
    with tempfile.TemporaryDirectory() as folder:
        wanted = [name for name in CASES if not (options.quick and name == "mobilenet_v2_96")]
        for name in [options.only] if options.only else wanted:
            figures |= measure(name, folder, options.quick)
    for key, value in figures.items():
        print(f"{key:40s} {value:12.4g}")
    if options.json:
        budget = "1 process of 6 steps each" if options.quick else "5 processes of 8 to 20 steps each"
        machine = f"{cpu_name()}, {os.cpu_count()} cores, {THREADS} threads, {versions()}"
        report = {"figures": figures, "budget": f"{budget}, fastest step", "machine": machine}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in ("torch", "onnxruntime"))


if __name__ == "__main__":
    main()
