"""A 1x1 convolution as one product of matrices over the pixels of all samples, channels outermost."""

from __future__ import annotations

from torch import Tensor


class Pointwise:
    """Kernel 1x1, stride 1: see :class:`edge_export.decompositions.convolution.Form`."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[B, Co, H, W] of [B, C, H, W] and [Co, C, 1, 1]."""
        made = weight.flatten(1) @ _rows(x)
        return made.reshape(weight.shape[0], -1, *x.shape[2:]).transpose(0, 1)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """Another such convolution, with the channels swapped."""
        return self.forward(grad_output, weight.transpose(0, 1))

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A product over all pixels."""
        return (_rows(grad_output) @ _rows(x).t()).reshape(weight.shape)


def _rows(x: Tensor) -> Tensor:
    """[C, B · H · W]."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)
