"""After an export: the train program is run as devices do and held against PyTorch in float64.

The yardstick is PyTorch's own float32, since how much rounding a model suffers is the model's affair. A
gradient may jump where a ReLU's input rounds to the other side of 0, for either of the two; so a draw
that fails is repeated on new random data, and what is wrong fails every time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge_export.classifier import Classifier
from edge_export.errors import ExportError
from edge_export.layers import ExplicitDropout
from edge_export.training_step import Tensors
from edge_sdk.manifest import Option
from edge_sdk.tensors import Array

DRAWS = 8
"""Of random data: a ReLU6 of MobileNetV2 is on the other side in every third."""
MULTIPLE = 8.0
FLOOR = 2e-5
"""The program may be MULTIPLE times as far from float64 as PyTorch's float32, plus FLOOR of the magnitude."""
FROZEN_FLOOR = 1e-5
"""In FLOOR's place for a network that only computes features."""

OWN_LIMIT = 0.02
"""What counts as rounding of PyTorch's own: MobileNetV2's ReLU6 kinks give 0.016, chance gives much more."""

LR, WEIGHT_DECAY = 0.5, 0.01
BATCHES = ((4, 0), (7, 2))
"""Samples, and how many of them are padding of weight 0, where a program takes any number."""

Step: TypeAlias = Callable[[Tensors], dict[str, Array]]
"""Runs a train program: its arguments by name, to its results by name."""


def verify_train(
    classifier: Classifier,
    step: Step,
    seed: int = 0,
    options: Collection[Option] = (),
    batches: Sequence[tuple[int, int]] = BATCHES,
) -> None:
    """Run one step on random batches, one after the other in the same session.

    Args:
        step: the train program.
        batches: samples of each, and how many of them are padding.

    Raises:
        ExportError: a tensor after the step, or the loss, is further from PyTorch's than rounding
            explains; the message names the worst one.
    """
    generator = torch.Generator().manual_seed(seed)
    for samples, padding in batches:
        for draw in range(DRAWS):
            batch = _random_batch(classifier, samples, padding, generator)
            batch |= _random_settings(classifier, options, generator)
            worst, excess = _worst(classifier, step, batch)
            if excess <= 1:
                break
            if draw == DRAWS - 1:
                raise ExportError(
                    f"{worst} after a step on a batch of {samples} ({padding} of them padding) is "
                    f"{excess:.3g} times further from PyTorch's float64 than rounding explains: the model "
                    "draws random numbers, looks across the batch, or uses an operator exported wrongly"
                )


def frozen_as_near(found: Array, single: Array, exact: Array) -> bool:
    """Whether a frozen program's features are as near to float64's, ``exact``, as float32's own allow."""
    allowed = MULTIPLE * np.abs(single - exact).max() + FROZEN_FLOOR * np.abs(exact).max()
    return bool(np.abs(found - exact).max() <= allowed)


def _random_batch(classifier: Classifier, samples: int, padding: int, generator: torch.Generator) -> Tensors:
    weight = torch.ones(samples)
    weight[samples - padding :] = 0
    noise = {
        f"noise{i}": torch.rand(samples, *shape, generator=generator)
        for i, shape in enumerate(classifier.noise_shapes)
    }
    return {
        "x": torch.randn(samples, *classifier.input_shape, generator=generator),
        "y": torch.randint(classifier.classes, (samples,), generator=generator),
        "sample_weight": weight,
        "lr": torch.tensor(LR),
        "weight_decay": torch.tensor(WEIGHT_DECAY),
        **noise,
    }


def _random_settings(
    classifier: Classifier, options: Collection[Option], generator: torch.Generator
) -> Tensors:
    """What the options take: a velocity and an anchor at random, and a norm that clips."""
    settings: Tensors = {}
    for option, prefix in (("momentum", "velocity"), ("proximal", "anchor")):
        if option in options:
            settings[option] = torch.tensor(0.9)
            for name in sorted(classifier.trainable):
                shape = classifier.state[name].shape
                settings[f"{prefix}/{name}"] = torch.randn(shape, generator=generator) / 8
    if "clipping" in options:
        settings["clip_norm"] = torch.tensor(0.1)
    return settings


def _worst(classifier: Classifier, step: Step, batch: Tensors) -> tuple[str, float]:
    """Name of the result that is furthest off, and its error as a multiple of what is allowed."""
    exact = _pytorch_step(classifier, batch, torch.float64)
    single = _pytorch_step(classifier, batch, torch.float32)
    traced = _traced_step(classifier, step, batch)
    scale = {name: float(np.abs(value).max(initial=1e-3)) for name, value in exact.items()}
    own = max(float(np.abs(single[name] - exact[name]).max(initial=0)) / scale[name] for name in exact)
    allowed = MULTIPLE * min(own, OWN_LIMIT) + FLOOR
    excess = {
        name: float(np.abs(traced[name] - exact[name]).max(initial=0)) / scale[name] / allowed
        for name in exact
    }
    # A NaN compares as neither larger nor smaller, so it has to be looked for.
    return max(excess.items(), key=lambda item: np.nan_to_num(item[1], nan=np.inf))


def _pytorch_step(classifier: Classifier, batch: Tensors, dtype: torch.dtype) -> dict[str, Array]:
    """What PyTorch makes of the batch without its padding: every tensor's change, the loss, the hits."""
    model = copy.deepcopy(classifier.model).to(dtype).train()
    kept = batch["sample_weight"] > 0
    x, y = batch["x"][kept].to(dtype), batch["y"][kept]
    noise = iter([tensor[kept].to(dtype) for name, tensor in batch.items() if name.startswith("noise")])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    factor = float(batch["momentum"]) if "momentum" in batch else 0.0
    optimiser = torch.optim.SGD(trained.values(), lr=LR, weight_decay=WEIGHT_DECAY, momentum=factor)
    if factor:
        for name, parameter in trained.items():
            optimiser.state[parameter]["momentum_buffer"] = batch[f"velocity/{name}"].to(dtype, copy=True)
    try:
        with ExplicitDropout(lambda _: next(noise)):
            logits = model(x)
        loss = functional.cross_entropy(logits, y)
        _add_pull(loss, trained, batch).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise ExportError(
            f"the model cannot be verified in {dtype} ({line}): follow x.dtype in forward"
        ) from error
    if "clip_norm" in batch:
        torch.nn.utils.clip_grad_norm_(trained.values(), float(batch["clip_norm"]))
    optimiser.step()
    after = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    hits = (logits.argmax(1) == y).sum()
    return {
        **{name: _numpy(after[name]) - _numpy(before) for name, before in classifier.state.items()},
        **{
            f"velocity/{name}": _numpy(optimiser.state[parameter]["momentum_buffer"])
            for name, parameter in (trained.items() if factor else ())
        },
        "loss_sum": _numpy(loss.detach() * len(x)),
        "correct": _numpy(hits),
    }


def _add_pull(loss: Tensor, trained: Mapping[str, Tensor], batch: Tensors) -> Tensor:
    if "proximal" not in batch:
        return loss
    distances = [((tensor - batch[f"anchor/{name}"]) ** 2).sum() for name, tensor in trained.items()]
    return loss + float(batch["proximal"]) / 2 * torch.stack(distances).sum()


def _traced_step(classifier: Classifier, step: Step, batch: Tensors) -> dict[str, Array]:
    results = step({**{f"weights/{name}": tensor for name, tensor in classifier.state.items()}, **batch})
    return {
        **{name: results[f"new/{name}"] - _numpy(before) for name, before in classifier.state.items()},
        **{
            name.removeprefix("new_"): value
            for name, value in results.items()
            if name.startswith("new_velocity/")
        },
        "loss_sum": results["loss_sum"].astype(np.float64),
        "correct": results["correct"].astype(np.float64),
    }


def _numpy(tensor: Tensor) -> Array:
    return tensor.double().numpy()
