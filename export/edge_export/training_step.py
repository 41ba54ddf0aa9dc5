"""One step of weighted SGD as a pure function: the text that every runtime's train program is made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional

from edge_export.layers import ExplicitDropout, WeightedBatchNorm

Tensors: TypeAlias = dict[str, Tensor]


class StepResult(NamedTuple):
    """What a step gives: the model after it, and how the model before it did on the batch."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors
    loss_sum: Tensor
    correct: Tensor


class Momentum(NamedTuple):
    """Local momentum: v ← factor · v + gradient, and the step is lr · v."""

    factor: Tensor
    velocity: Tensors


class Proximal(NamedTuple):
    """FedProx (Li et al., arXiv 1812.06127): strength / 2 · ‖params − anchor‖² is added to the loss."""

    strength: Tensor
    anchor: Tensors


def training_step(
    model: nn.Module,
    params: Tensors,
    buffers: Tensors,
    x: Tensor,
    y: Tensor,
    sample_weight: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    noise: Sequence[Tensor] = (),
    *,
    momentum: Momentum | None = None,
    proximal: Proximal | None = None,
    clip_norm: Tensor | None = None,
) -> StepResult:
    """Step down the gradient of Σ wᵢ lossᵢ / Σ wᵢ, cross-entropy the loss, as ``torch.optim.SGD`` would.

    A sample of weight 0 leaves no trace, in BatchNorm's statistics either; at least one weight must be
    above 0. The model must be in train mode; neither it nor the arguments are changed.

    Args:
        model: gives logits [B, classes] for ``x``.
        params: the trainable parameters, by name.
        buffers: all else that the model holds (running statistics, counters, frozen parameters). They
            come back as the forward pass leaves them.
        x: float [B, C, H, W], normalised.
        y: int64 [B], labels.
        sample_weight: float [B].
        lr: float scalar.
        weight_decay: float scalar, added as ``weight_decay * p`` to the gradient of each of ``params``.
        noise: uniform in [0, 1), [B, ...], one for each dropout layer in order of execution.
        momentum: float scalar, and a velocity for each of ``params``.
        proximal: float scalar, and for each of ``params`` what it is pulled towards.
        clip_norm: float scalar, the largest L2 norm of the whole gradient (with the proximal term's, before
            weight decay), as ``torch.nn.utils.clip_grad_norm_`` has it.

    Returns:
        The new parameters, buffers and velocity ({} without momentum); Σ wᵢ lossᵢ, a float scalar; and the
        number of samples of positive weight whose largest logit is that of the label, an int64
        scalar.
    """

    def objective(params: Tensors) -> tuple[Tensor, tuple[Tensors, Tensor, Tensor]]:
        # BatchNorm updates its buffers in place, which functorch allows only on tensors made in here.
        updated = {name: buffer.clone() for name, buffer in buffers.items()}
        remaining = iter(noise)
        with WeightedBatchNorm(sample_weight), ExplicitDropout(lambda _: next(remaining)):
            logits = functional_call(model, {**params, **updated}, (x,))
        loss_sum, correct = score(logits, y, sample_weight)
        return loss_sum * (scale / sample_weight.sum()), (updated, loss_sum, correct)

    # Without momentum and clipping the loss is multiplied by lr, one number, and its gradients are the
    # steps; every gradient would have to be multiplied otherwise.
    steps_at_once = momentum is None and clip_norm is None
    scale = lr if steps_at_once else torch.ones_like(lr)
    gradients, (_, (updated, loss_sum, correct)) = grad_and_value(objective, has_aux=True)(params)
    if proximal is not None:
        pull = scale * proximal.strength
        gradients = {
            name: gradient + pull * (params[name] - proximal.anchor[name])
            for name, gradient in gradients.items()
        }
    if clip_norm is not None:
        gradients = _clipped(gradients, clip_norm)

    velocity: Tensors = {}
    if momentum is not None:
        velocity = {
            name: momentum.factor * momentum.velocity[name] + (gradient + weight_decay * params[name])
            for name, gradient in gradients.items()
        }
        new = {name: param - lr * velocity[name] for name, param in params.items()}
    else:
        kept = 1 - lr * weight_decay
        steps = gradients if steps_at_once else {name: lr * g for name, g in gradients.items()}
        new = {name: param * kept - steps[name] for name, param in params.items()}
    detached = {name: tensor.detach() for name, tensor in updated.items()}
    return StepResult(new, detached, velocity, loss_sum, correct)


def _clipped(gradients: Tensors, clip_norm: Tensor) -> Tensors:
    squares = [(gradient * gradient).sum() for gradient in gradients.values()]
    norm = torch.sqrt(torch.stack(squares).sum())
    factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def score(logits: Tensor, y: Tensor, sample_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Σ wᵢ cross-entropyᵢ, and how many samples of positive weight the largest logit labels right.

    Args:
        logits: float [B, classes].
        y: int64 [B].
        sample_weight: float [B].
    """
    # One-hot in place of nll_loss: its ONNX translation takes the total weight to be 1, so that the
    # gradient comes out B times too large.
    one_hot = (y.unsqueeze(1) == torch.arange(logits.shape[1], device=y.device)).to(logits.dtype)
    losses = -(functional.log_softmax(logits, 1) * one_hot).sum(1)
    hits = (logits.argmax(1) == y).to(torch.int64) * (sample_weight > 0).to(torch.int64)
    return (losses * sample_weight).sum(), hits.sum()


def split_state(model: nn.Module) -> tuple[Tensors, Tensors]:
    """The tensors of ``model`` as ``(params, buffers)`` of :func:`training_step`, detached, not copied."""
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return params, {name: tensor.detach() for name, tensor in _others(model)}


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
    yield from model.named_buffers()
