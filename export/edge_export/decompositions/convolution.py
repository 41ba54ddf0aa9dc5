"""Gradients of a 2-D convolution, each in the form that ONNX Runtime computes fastest.

Shapes throughout: ``x`` [B, C, H, W], ``weight`` [Co, C / groups, kh, kw], ``grad_output`` [B, Co, Ho, Wo].
The batch may be symbolic; all else is known. Ho and Wo follow from the rest, as in ``nn.Conv2d``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.decompositions import spectral, toeplitz
from edge_export.errors import ExportError

aten = torch.ops.aten

SMALL_MAP = 15
"""Pixels up to which a product for each sample is too narrow to be fast."""


class Geometry(NamedTuple):
    """How the kernel moves over the map: (vertical, horizontal) each, and the number of groups."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def moves_alone(self) -> bool:
        """Stride 1 and no padding: with a 1x1 kernel every pixel is by itself."""
        return self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1

    def out(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        """Extent of the output's maps."""
        height, width = (
            (int(n) + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                x.shape[2:], _kernel(weight), self.stride, self.padding, self.dilation, strict=True
            )
        )
        return height, width


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """``aten.convolution`` where another form is faster; NotImplemented leaves it as it is."""
    del output_padding
    of_batch = any(isinstance(size, torch.SymInt) for size in (*weight.shape, *x.shape[1:]))
    if transposed or x.dim() != 4 or of_batch:  # a weight gradient's kernel may be as large as the batch
        return NotImplemented  # type: ignore[no-any-return]
    geometry = Geometry(_pair(stride), _pair(padding), _pair(dilation), groups)
    size, out = _sizes(x), geometry.out(x, weight)
    if _is_small_pointwise(x, weight, geometry):
        result = pointwise(x, weight)
        return result if bias is None else result + bias.view(-1, 1, 1)
    if _takes_spectral(x, weight, geometry, out):
        result = spectral.forward(x, weight, _spectra(x, weight, geometry, out), out)
    elif _takes_toeplitz(x, weight, groups, out):
        pattern = _patterns(x, weight, geometry, out)
        result = toeplitz.forward(x, toeplitz.matrices(weight, pattern, size[0] * size[1]), out)
    else:
        return NotImplemented  # type: ignore[no-any-return]
    return result if bias is None else result + bias.view(-1, 1, 1)


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.convolution_backward``: gradients of input, weight and bias, those that the mask asks for.

    Raises:
        ExportError: the convolution is not over two axes.
    """
    del bias_sizes, output_padding
    if x.dim() != 4:
        kind = f"convolution over {x.dim() - 2} axes"
        raise ExportError(f"training a {kind} is not covered (aten.convolution_backward): use nn.Conv2d")
    geometry = Geometry(_pair(stride), _pair(padding), _pair(dilation), groups)
    if transposed:  # the same with input and output in each other's places
        return (
            _convolve(grad_output, weight, geometry) if output_mask[0] else None,
            weight_gradient(x, grad_output, weight, geometry) if output_mask[1] else None,
            grad_output.sum((0, 2, 3)) if output_mask[2] else None,
        )
    if _takes_toeplitz(x, weight, groups, _sizes(grad_output)):
        return _toeplitz_backward(grad_output, x, weight, geometry, output_mask)
    if _takes_spectral(x, weight, geometry, _sizes(grad_output)):
        by = _spectra(x, weight, geometry, _sizes(grad_output))
        return (
            spectral.input_gradient(grad_output, weight, by, _sizes(x)) if output_mask[0] else None,
            spectral.weight_gradient(grad_output, x, weight, by) if output_mask[1] else None,
            grad_output.sum((0, 2, 3)) if output_mask[2] else None,
        )
    return (
        input_gradient(grad_output, x, weight, geometry) if output_mask[0] else None,
        weight_gradient(grad_output, x, weight, geometry) if output_mask[1] else None,
        grad_output.sum((0, 2, 3)) if output_mask[2] else None,
    )


def _toeplitz_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    size = _sizes(x)
    pattern = _patterns(x, weight, geometry, _sizes(grad_output))
    matrix = toeplitz.matrices(weight, pattern, size[0] * size[1])
    return (
        toeplitz.input_gradient(grad_output, matrix, size) if output_mask[0] else None,
        toeplitz.weight_gradient(grad_output, x, weight, pattern) if output_mask[1] else None,
        grad_output.sum((0, 2, 3)) if output_mask[2] else None,
    )


def input_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Gradient [B, C, H, W] by the input: the form to take by kind of convolution."""
    depthwise = weight.shape[1] == 1 and weight.shape[0] == geometry.groups
    # Flipping needs the padding that is left over to be none below 0.
    fits = all(
        p <= d * (k - 1) for p, d, k in zip(geometry.padding, geometry.dilation, _kernel(weight), strict=True)
    )
    if _kernel(weight) == (1, 1) and geometry.moves_alone:
        return pointwise_input_gradient(grad_output, weight, _is_small_pointwise(x, weight, geometry))
    if depthwise and geometry.stride == (1, 1) and fits:
        return flipped_input_gradient(grad_output, weight, geometry)
    return transposed_input_gradient(grad_output, x, weight, geometry)


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution on a small map: one product over the pixels of all samples."""
    rows = x.transpose(0, 1).reshape(weight.shape[1], -1)
    return (weight.flatten(1) @ rows).reshape(weight.shape[0], -1, *_sizes(x)).transpose(0, 1)


def pointwise_input_gradient(grad_output: Tensor, weight: Tensor, small: bool) -> Tensor:
    """For a 1x1 kernel: another 1x1 convolution, with the channels swapped."""
    if small:
        return pointwise(grad_output, weight.transpose(0, 1))
    return _convolve(grad_output, weight.transpose(0, 1), Geometry((1, 1), (0, 0), (1, 1), 1))


def flipped_input_gradient(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For depthwise at stride 1: the convolution with the kernel turned by 180 degrees."""
    (kh, kw), (dh, dw), (ph, pw) = _kernel(weight), geometry.dilation, geometry.padding
    rest = (dh * (kh - 1) - ph, dw * (kw - 1) - pw)
    return _convolve(grad_output, weight.flip(2, 3), geometry._replace(padding=rest))


def transposed_input_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For all others: the transposed convolution, padded by the rows that no window reached."""
    unreached = [
        int(size) - ((int(out) - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, out, s, p, d, k in zip(
            x.shape[2:],
            grad_output.shape[2:],
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            _kernel(weight),
            strict=True,
        )
    ]
    stride, padding, dilation, groups = geometry
    result: Tensor = aten.convolution(
        grad_output, weight, None, stride, padding, dilation, True, unreached, groups
    )
    return result


def weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Gradient [Co, C / groups, kh, kw] by the weight: the form to take by kind of convolution."""
    if _kernel(weight) == (1, 1) and geometry.moves_alone:
        return pointwise_weight_gradient(grad_output, x, weight)
    if _is_depthwise(x, weight, geometry.groups):
        stride, padding, dilation, _ = geometry
        return toeplitz.rowwise_weight_gradient(grad_output, x, weight, stride, padding, dilation)
    if geometry.groups > 1:
        return swapped_weight_gradient(grad_output, x, weight, geometry)
    if x.shape[1] >= 16:
        return tapwise_weight_gradient(grad_output, x, weight, geometry)
    return rowwise_weight_gradient(grad_output, x, weight, geometry)


def pointwise_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """For a 1x1 kernel: one product over all pixels, or one a sample where the maps are large."""
    out_channels, channels, pixels = (
        weight.shape[0],
        weight.shape[1],
        grad_output.shape[2] * grad_output.shape[3],
    )
    if out_channels * channels > pixels * (out_channels + channels):
        rows = grad_output.transpose(0, 1).reshape(out_channels, -1)
        return (rows @ x.transpose(0, 1).reshape(channels, -1).t()).reshape(weight.shape)
    per_sample = grad_output.reshape(-1, out_channels, pixels) @ x.reshape(-1, channels, pixels).transpose(
        1, 2
    )
    return per_sample.sum(0).reshape(weight.shape)


def tapwise_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For 16 input channels or more: a product for each tap of the kernel, with the channels last."""
    (kh, kw), (ph, pw) = _kernel(weight), geometry.padding
    out_channels, channels = weight.shape[:2]
    above, beside = _taps(grad_output, weight, geometry)
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph))
    rows = grad_output.transpose(0, 1).reshape(out_channels, -1)
    taps = [rows @ padded[:, i, j].reshape(-1, channels) for i in above for j in beside]
    return torch.stack(taps, 2).reshape(out_channels, channels, kh, kw)


def rowwise_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For few input channels: the taps of a kernel row side by side as channels, a product for each row."""
    (kh, kw), (ph, pw) = _kernel(weight), geometry.padding
    out_channels, channels = weight.shape[:2]
    pixels = grad_output.shape[2] * grad_output.shape[3]
    above, beside = _taps(grad_output, weight, geometry)
    padded = functional.pad(x, (pw, pw, ph, ph))
    columns = torch.cat([padded[:, :, :, j] for j in beside], 1)
    flat = grad_output.reshape(-1, out_channels, pixels)
    rows = [
        (flat @ columns[:, :, i].reshape(-1, kw * channels, pixels).transpose(1, 2)).sum(0) for i in above
    ]
    return torch.stack(rows, 1).reshape(out_channels, kh, kw, channels).permute(0, 3, 1, 2)


def swapped_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For groups: a convolution with batch and channels swapped, stride and dilation exchanged."""
    (kh, kw), groups = _kernel(weight), geometry.groups
    channels, height, width = x.shape[1:]
    swapped = x.reshape(-1, groups, channels // groups, height, width).permute(2, 1, 0, 3, 4)
    result = _convolve(
        swapped.reshape(channels // groups, -1, height, width),
        grad_output.transpose(0, 1),
        Geometry(geometry.dilation, geometry.padding, geometry.stride, groups),
    )
    return result[:, :, :kh, :kw].transpose(0, 1).reshape(weight.shape)


def _taps(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> tuple[list[slice], list[slice]]:
    """For each tap of the kernel the rows, and the columns, of the padded input that it meets."""
    vertical, horizontal = (
        [slice(tap * d, tap * d + s * (int(out) - 1) + 1, s) for tap in range(k)]
        for k, out, s, d in zip(
            _kernel(weight), grad_output.shape[2:], geometry.stride, geometry.dilation, strict=True
        )
    )
    return vertical, horizontal


def _is_small_pointwise(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    pixels = int(x.shape[2]) * int(x.shape[3])
    return _kernel(weight) == (1, 1) and geometry.moves_alone and pixels <= SMALL_MAP


def _takes_spectral(x: Tensor, weight: Tensor, geometry: Geometry, out: tuple[int, int]) -> bool:
    return geometry.groups == 1 and spectral.pays(
        [int(size) for size in weight.shape], _sizes(x), out, geometry.stride, geometry.padding
    )


def _spectra(x: Tensor, weight: Tensor, geometry: Geometry, out: tuple[int, int]) -> spectral.Spectra:
    stride, padding, dilation, _ = geometry
    return spectral.spectra(_kernel(weight), _sizes(x), out, stride, padding, dilation, x)


def _takes_toeplitz(x: Tensor, weight: Tensor, groups: int, out: tuple[int, int]) -> bool:
    (height, width), (out_height, out_width) = _sizes(x), out
    entries = height * width * out_height * out_width
    return _is_depthwise(x, weight, groups) and entries <= toeplitz.MAX_ENTRIES


def _is_depthwise(x: Tensor, weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[0] == x.shape[1] == groups and weight.shape[1] == 1


def _patterns(x: Tensor, weight: Tensor, geometry: Geometry, out: tuple[int, int]) -> Tensor:
    stride, padding, dilation, _ = geometry
    return toeplitz.patterns(_kernel(weight), _sizes(x), out, stride, padding, dilation, x)


def _sizes(x: Tensor) -> tuple[int, int]:
    return int(x.shape[2]), int(x.shape[3])


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    result: Tensor = aten.convolution(x, weight, None, stride, padding, dilation, False, (0, 0), groups)
    return result


def _kernel(weight: Tensor) -> tuple[int, int]:
    return int(weight.shape[2]), int(weight.shape[3])


def _pair(values: Sequence[int]) -> tuple[int, int]:
    vertical, horizontal = values if len(values) == 2 else (values[0], values[0])
    return int(vertical), int(horizontal)
