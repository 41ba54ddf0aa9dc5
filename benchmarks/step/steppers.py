"""One training step in each runtime, as a function from a batch to its mean loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from step.cases import CASES, THREADS, batches, make_model

LR = 0.01
SETTLED_LR = LR / 10


class Stepper(NamedTuple):
    """``step(x, y)`` trains and gives the loss before it; ``weights()`` are those that train, float64."""

    step: Callable[[np.ndarray, np.ndarray], float]
    weights: Callable[[], dict[str, np.ndarray]]


def stepper(kind: str, name: str, folder: str, start: str | None = None) -> Stepper:
    """Of ``kind``: eager, exact (PyTorch in float64), nudged (PyTorch from weights 1e-7 larger), onnx,
    executorch or stock; from the weights that :func:`settle` wrote to ``start``, at a tenth of the rate."""
    if kind in ("eager", "exact", "nudged"):
        dtype, nudge = ("float64" if kind == "exact" else "float32"), (1e-7 if kind == "nudged" else 0.0)
        return eager(name, dtype, nudge, start)
    return stock(name) if kind == "stock" else ours(kind, f"{folder}/{name}.edge", start)


def settle(name: str, path: str) -> None:
    """Write the weights that PyTorch comes to on batches that the loss curves do not see."""
    model = make_model(name)
    step = torch_step(model, LR)
    for x, y in batches(CASES[name], CASES[name].settles, seed=1):
        step(x, y)
    np.savez(path, **{key: value.numpy() for key, value in model.state_dict().items()})


def eager(name: str, dtype: str, nudge: float, start: str | None) -> Stepper:
    import torch

    model = make_model(name)
    if start:
        model.load_state_dict({key: torch.from_numpy(value) for key, value in np.load(start).items()})
    model.to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    # A head's parameters have their names in the whole model.
    prefix = f"{CASES[name].head_only}." if CASES[name].head_only else ""
    return Stepper(
        torch_step(model, SETTLED_LR if start else LR),
        lambda: {prefix + key: p.detach().double().numpy() for key, p in model.named_parameters()},
    )


def torch_step(model: Any, lr: float) -> Callable[[np.ndarray, np.ndarray], float]:
    """A step of SGD on ``model``, in its own dtype."""
    import torch
    from torch.nn import functional

    dtype = next(model.parameters()).dtype
    optimiser = torch.optim.SGD(model.train().parameters(), lr=lr)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(torch.from_numpy(x).to(dtype)), torch.from_numpy(y))
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def ours(runtime_name: str, bundle: str, start: str | None) -> Stepper:
    from edge_sdk import Bundle
    from edge_sdk.runtime import Optimiser, open_runtime

    opened = Bundle.read(Path(bundle))
    runtime = open_runtime(opened, runtime_name, threads=THREADS)
    if start:
        runtime.set_weights(dict(np.load(start)))
    sgd = Optimiser(lr=SETTLED_LR if start else LR)
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
