"""Layers that behave differently in a federated step: dropout and BatchNorm, intercepted where they run.

PyTorch draws a dropout mask itself and gives every sample of a batch the same say in BatchNorm. A
training program must do neither: its noise is an input, since random numbers drawn inside an ONNX
graph repeat from session to session and every device would share its masks; and a padded sample, of
weight 0, must leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.nn import functional

from edge_export.batch_norm import WeightedNormalisation
from edge_export.errors import ExportError
from edge_export.replacing import Replacing

NoiseSource = Callable[[tuple[int, ...]], Tensor]
"""Gives uniform noise in [0, 1) of shape [batch, *shape], from the ``shape`` of one sample."""


class ExplicitDropout(Replacing):
    """Within this context dropout takes its noise from a source, one call a layer in order of execution.

    An element survives where its noise is at least p, and is scaled by 1 / (1 - p). Dropout of whole
    channels (``nn.Dropout2d``) takes one number a channel, that of whole branches (stochastic depth, Huang et
    al., arXiv 1603.09382, which libraries draw by ``Tensor.bernoulli_``) one a sample.
    """

    def __init__(self, source: NoiseSource) -> None:
        super().__init__()
        self._source = source

    def replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Dropout by explicit noise."""
        if function is functional.dropout:
            return partial(self._dropout, False)
        if function in (functional.dropout1d, functional.dropout2d, functional.dropout3d):
            return partial(self._dropout, True)
        return self._bernoulli if function == Tensor.bernoulli_ else function

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        del inplace  # the result is the same; a traced step has no aliases to keep
        if not training or p == 0:
            return input
        if p == 1:
            return input * 0
        shape = tuple(input.shape[1:])
        if channels:
            shape = (shape[0], *[1] * (len(shape) - 1))
        kept = (self._source(shape) >= p).to(input.dtype)
        return input * (kept * (1 / (1 - p)))

    def _bernoulli(self, input: Tensor, p: float = 0.5, *, generator: object = None) -> Tensor:
        del generator
        kept = self._source(tuple(input.shape[1:])) >= 1 - p
        if kept.shape != input.shape:
            raise ExportError("a random mask whose first axis is not the batch is not covered")
        return input.copy_(kept.to(input.dtype))


class WeightedBatchNorm(Replacing):
    """Within this context BatchNorm in train mode weighs each sample.

    Mean, biased variance, the unbiased running variance and, by differentiation, the backward pass use
    Σw where PyTorch uses the batch size; at equal weights it is PyTorch's BatchNorm (Ioffe and Szegedy,
    arXiv 1502.03167). It is not ONNX Runtime's BatchNormalization in training mode, which overwrites its
    own inputs and is left out of its small builds: see :mod:`edge_export.batch_norm`.

    A batch of a single value a channel, for which PyTorch raises because it has no variance, is normalised
    to 0 and leaves the running variance as it is.

    Args:
        sample_weight: float [batch], the sum above 0.
    """

    def __init__(self, sample_weight: Tensor) -> None:
        super().__init__()
        self._sample_weight = sample_weight

    def replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """BatchNorm by weighted statistics."""
        return self._batch_norm if function is functional.batch_norm else function

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if input.shape[0] != self._sample_weight.shape[0]:
            raise ExportError("a BatchNorm layer sees a first axis that is not the batch")
        share = self._sample_weight.to(input.dtype)
        scale = input.new_ones(input.shape[1]) if weight is None else weight
        shift = input.new_zeros(input.shape[1]) if bias is None else bias
        normalise = cast(Callable[..., tuple[Tensor, ...]], WeightedNormalisation.apply)
        output, mean, variance, *_ = normalise(input, share, scale, shift, eps)
        if running_mean is not None and running_var is not None:
            count = self._sample_weight.sum() * input[0, 0].numel()
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            moved = momentum * (count > 1).to(input.dtype)
            running_mean.copy_(running_mean * (1 - momentum) + mean.detach() * momentum)
            running_var.copy_(running_var * (1 - moved) + unbiased * moved)
        return output
