"""One training step in each runtime, as a function from a batch to its mean loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from step.cases import CASES, THREADS, make_model

LR = 0.01


class Stepper(NamedTuple):
    """``step(x, y)`` trains and gives the loss before it; ``weights()`` are those that train, float64."""

    step: Callable[[np.ndarray, np.ndarray], float]
    weights: Callable[[], dict[str, np.ndarray]]


def stepper(kind: str, name: str, folder: str) -> Stepper:
    """Of ``kind``: eager, exact (PyTorch in float64), nudged (PyTorch from weights 1e-7 larger), onnx,
    executorch or stock."""
    if kind in ("eager", "exact", "nudged"):
        return eager(name, "float64" if kind == "exact" else "float32", 1e-7 if kind == "nudged" else 0.0)
    return stock(name) if kind == "stock" else ours(kind, f"{folder}/{name}.edge")


def eager(name: str, dtype: str, nudge: float) -> Stepper:
    import torch
    from torch.nn import functional

    model = make_model(name).to(getattr(torch, dtype)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        optimiser.zero_grad()
        logits = model(torch.from_numpy(x).to(getattr(torch, dtype)))
        loss = functional.cross_entropy(logits, torch.from_numpy(y))
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    # A head's parameters have their names in the whole model.
    prefix = f"{CASES[name].head_only}." if CASES[name].head_only else ""
    return Stepper(
        step, lambda: {prefix + key: p.detach().double().numpy() for key, p in model.named_parameters()}
    )


def ours(runtime_name: str, bundle: str) -> Stepper:
    from edge_sdk import Bundle
    from edge_sdk.runtime import Optimiser, open_runtime

    opened = Bundle.read(Path(bundle))
    runtime = open_runtime(opened, runtime_name, threads=THREADS)
    sgd = Optimiser(lr=LR)
    trained = {spec.name for spec in opened.manifest.trainable}

    def step(x: np.ndarray, y: np.ndarray) -> float:
        return runtime.train_step(x, y, np.ones(len(y), np.float32), sgd).loss / len(y)

    def weights() -> dict[str, np.ndarray]:
        return {key: a.astype(np.float64) for key, a in runtime.get_weights().items() if key in trained}

    return Stepper(step, weights)


def stock(name: str) -> Stepper:
    """ExecuTorch's own way: the joint graph of forward and backward pass in its TrainingModule."""
    import torch
    from executorch.exir import to_edge
    from executorch.extension.training import (
        _load_for_executorch_for_training_from_buffer,
        get_sgd_optimizer,
    )
    from torch.export import export
    from torch.export.experimental import _export_forward_backward
    from torch.nn import functional

    case, net = CASES[name], make_model(name)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any, y: Any) -> Any:
            return functional.cross_entropy(self.net(x), y)

    example = (torch.randn(case.batch, *case.shape), torch.zeros(case.batch, dtype=torch.int64))
    joint = _export_forward_backward(export(WithLoss(), example, strict=False))
    # The module reads from these bytes and does not keep them alive.
    data = to_edge(joint).to_executorch().buffer
    module = _load_for_executorch_for_training_from_buffer(data)
    optimiser: Any = None

    def step(x: np.ndarray, y: np.ndarray) -> float:
        nonlocal optimiser
        loss, *_ = module.forward_backward("forward", (torch.from_numpy(x), torch.from_numpy(y)))
        loss = float(loss)
        if optimiser is None:
            optimiser = get_sgd_optimizer(module.named_parameters(), LR)
        optimiser.step(module.named_gradients())
        return loss

    def weights() -> dict[str, np.ndarray]:
        assert data
        named = module.named_parameters()
        return {key.removeprefix("net."): p.double().numpy() for key, p in named.items()}

    return Stepper(step, weights)
