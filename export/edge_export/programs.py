"""The four programs of a bundle as functions from named tensors to named tensors.

A program says nothing of a runtime: :mod:`edge_export.onnx` lowers it. docs/bundle.md specifies the names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from edge_export.classifier import Classifier
from edge_export.training_step import (
    Momentum,
    Proximal,
    Tensors,
    score,
    split_state,
    training_step,
)
from edge_sdk.manifest import Option

BATCH = 3
"""Samples in an example batch. The programs take any number: a batch of 1 would be taken for a constant."""


@dataclass(frozen=True)
class Program:
    """A pure function with an example of each argument.

    Attributes:
        run: from the arguments by name to the results by name.
        arguments: examples; the first axis of those named in ``batched`` is the batch, of BATCH samples.
        batched: names of the arguments with a batch axis.
        batched_results: names of the results with a batch axis, also the first.
        trains: whether it differentiates and changes the weights.
    """

    run: Callable[[Tensors], Tensors]
    arguments: Tensors
    batched: frozenset[str]
    batched_results: frozenset[str] = frozenset()
    trains: bool = False


def all_programs(
    classifier: Classifier, options: Collection[Option] = (), batch: int = BATCH
) -> dict[str, Program]:
    """The four by name, with examples of a batch of ``batch`` samples."""
    return {
        "train": train(classifier, options, batch),
        "evaluate": evaluate(classifier, batch),
        "predict": predict(classifier, batch),
        "embed": embed(classifier, batch),
    }


def train(classifier: Classifier, options: Collection[Option], batch: int) -> Program:
    """One step of :func:`training_step`: to ``new/<name>`` for each tensor, ``loss_sum``, ``correct``.

    With the option ``momentum``, from ``velocity/<name>`` to ``new_velocity/<name>`` for each parameter as
    well; with ``proximal``, towards ``anchor/<name>``; with ``clipping``, by at most ``clip_norm``.
    """
    model = classifier.model
    params, buffers = split_state(model)
    noise = {f"noise{i}": torch.rand(batch, *shape) for i, shape in enumerate(classifier.noise_shapes)}

    def run(inputs: Tensors) -> Tensors:
        def group(prefix: str, names: Iterable[str]) -> Tensors:
            return {name: inputs[f"{prefix}/{name}"] for name in names}

        model.train()
        result = training_step(
            model,
            group("weights", params),
            group("weights", buffers),
            inputs["x"],
            inputs["y"],
            inputs["sample_weight"],
            inputs["lr"],
            inputs["weight_decay"],
            [inputs[name] for name in noise],
            momentum=Momentum(inputs["momentum"], group("velocity", params))
            if "momentum" in options
            else None,
            proximal=Proximal(inputs["proximal"], group("anchor", params)) if "proximal" in options else None,
            clip_norm=inputs["clip_norm"] if "clipping" in options else None,
        )
        moved = {**result.params, **result.buffers}
        new = {f"new/{name}": moved[name] for name in classifier.state}
        velocity = {f"new_velocity/{name}": tensor for name, tensor in result.velocity.items()}
        return {**new, **velocity, "loss_sum": result.loss_sum, "correct": result.correct}

    settings = {"lr": torch.tensor(0.1), "weight_decay": torch.tensor(0.0)}
    if "momentum" in options:
        settings["momentum"] = torch.tensor(0.9)
        settings |= {f"velocity/{name}": torch.zeros_like(tensor) for name, tensor in params.items()}
    if "proximal" in options:
        settings["proximal"] = torch.tensor(0.1)
        settings |= {f"anchor/{name}": tensor.clone() for name, tensor in params.items()}
    if "clipping" in options:
        settings["clip_norm"] = torch.tensor(1.0)
    arguments = {**_weights(classifier), **_batch(classifier, batch), **settings, **noise}
    return Program(run, arguments, frozenset({"x", "y", "sample_weight", *noise}), trains=True)


def evaluate(classifier: Classifier, batch: int) -> Program:
    """``loss_sum`` and ``correct`` of a batch, in eval mode."""

    def run(inputs: Tensors) -> Tensors:
        loss_sum, correct = score(_forward(classifier, inputs), inputs["y"], inputs["sample_weight"])
        return {"loss_sum": loss_sum, "correct": correct}

    examples = _batch(classifier, batch)
    return Program(run, {**_weights(classifier), **examples}, frozenset(examples))


def predict(classifier: Classifier, batch: int) -> Program:
    """``logits`` [B, classes], in eval mode."""

    def run(inputs: Tensors) -> Tensors:
        return {"logits": _forward(classifier, inputs)}

    arguments = {**_weights(classifier), "x": _batch(classifier, batch)["x"]}
    return Program(run, arguments, frozenset({"x"}), frozenset({"logits"}))


def embed(classifier: Classifier, batch: int) -> Program:
    """``features`` [B, feature_size]: what enters the head, in eval mode."""

    def run(inputs: Tensors) -> Tensors:
        with classifier.head_input() as seen:
            _forward(classifier, inputs)
        return {"features": seen[-1]}

    arguments = {**_weights(classifier), "x": _batch(classifier, batch)["x"]}
    return Program(run, arguments, frozenset({"x"}), frozenset({"features"}))


def frozen(network: nn.Module, input_shape: tuple[int, ...]) -> Program:
    """From ``x`` [B, *input_shape] to ``features``, by a network that holds its own weights."""

    def run(inputs: Tensors) -> Tensors:
        with torch.no_grad():
            return {"features": network(inputs["x"])}

    x = torch.rand(BATCH, *input_shape)
    return Program(run, {"x": x}, frozenset({"x"}), frozenset({"features"}))


def _forward(classifier: Classifier, inputs: Tensors) -> Tensor:
    classifier.model.eval()
    weights = {name: inputs[f"weights/{name}"] for name in classifier.state}
    logits: Tensor = functional_call(classifier.model, weights, (inputs["x"],))
    return logits


def _weights(classifier: Classifier) -> Tensors:
    return {f"weights/{name}": tensor for name, tensor in classifier.state.items()}


def _batch(classifier: Classifier, batch: int) -> Tensors:
    return {
        "x": torch.randn(batch, *classifier.input_shape),
        "y": torch.zeros(batch, dtype=torch.int64),
        "sample_weight": torch.ones(batch),
    }
