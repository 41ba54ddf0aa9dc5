"""Each formulation of a gradient against PyTorch's autograd in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from edge_export.decompositions import (
    activations,
    convolution,
    embedding,
    padding,
    pooling,
    reductions,
    slices,
    spectral,
    stock,
)
from edge_export.decompositions.convolution import form_of
from edge_export.decompositions.geometry import Geometry
from edge_export.decompositions.pointwise import Pointwise
from edge_export.decompositions.rowwise import Rowwise
from edge_export.decompositions.spectral import Spectral
from edge_export.decompositions.stock import Stock
from edge_export.decompositions.toeplitz import Toeplitz

torch.manual_seed(0)

# name: the form that is taken; batch, channels, out channels, height, width, kernel, stride, padding,
# dilation, groups
CONVOLUTIONS = {
    "odd map, stride 2": (Stock, 2, 3, 4, 9, 7, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a row that no window reaches": (Stock, 2, 3, 4, 8, 10, (3, 3), (2, 3), (0, 0), (1, 1), 1),
    "many channels, stride 2, dilated": (Stock, 3, 17, 4, 11, 9, (3, 2), (2, 1), (2, 1), (2, 2), 1),
    "1x1, large map": (Pointwise, 2, 3, 4, 9, 7, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1, small map": (Pointwise, 2, 16, 24, 2, 2, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1, stride 2": (Stock, 2, 3, 4, 9, 7, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "depthwise": (Toeplitz, 2, 6, 6, 9, 7, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "depthwise, stride 2, dilated": (Toeplitz, 2, 6, 6, 10, 9, (3, 3), (2, 2), (2, 2), (2, 2), 6),
    "depthwise, one pixel": (Toeplitz, 3, 4, 4, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise, padding beyond the kernel": (Toeplitz, 2, 4, 4, 5, 5, (2, 2), (1, 1), (2, 2), (1, 1), 4),
    "depthwise, large odd map": (Rowwise, 3, 4, 4, 17, 15, (3, 5), (1, 1), (1, 2), (1, 1), 4),
    "depthwise, large map, stride 2, dilated": (Rowwise, 2, 4, 4, 24, 23, (3, 3), (2, 2), (2, 1), (2, 1), 4),
    "depthwise, a stride beyond the kernel": (Rowwise, 2, 4, 4, 26, 25, (2, 2), (3, 3), (0, 0), (1, 1), 4),
    "depthwise, fast by taps": (Stock, 2, 4, 4, 12, 20, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise, slow by taps": (Rowwise, 2, 4, 4, 12, 20, (5, 5), (1, 1), (2, 2), (1, 1), 4),
    "depthwise, wide map": (Stock, 1, 2, 2, 5, 70, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise, wide map, stride 2": (Stock, 1, 2, 2, 6, 70, (3, 3), (2, 2), (1, 1), (1, 1), 2),
    "two channels out for each in": (Stock, 2, 4, 8, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "groups": (Stock, 3, 6, 9, 8, 7, (3, 3), (2, 1), (1, 0), (1, 1), 3),
    "large kernel": (Spectral, 3, 16, 24, 9, 8, (5, 3), (1, 1), (2, 1), (1, 1), 1),
    "batch of 1, many channels": (Spectral, 1, 16, 5, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "large kernel, no padding, dilated": (Spectral, 2, 8, 8, 12, 11, (5, 5), (1, 1), (0, 0), (1, 2), 1),
    "large kernel, stride 2": (Spectral, 2, 32, 32, 8, 9, (5, 5), (2, 2), (2, 2), (1, 1), 1),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_gradients_are_autograds(case):
    form, batch, channels, out, height, width, kernel, *moves, groups = CONVOLUTIONS[case]
    x = torch.randn(batch, channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, channels // groups, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(out, dtype=torch.float64, requires_grad=True)
    assert isinstance(form_of(weight, Geometry.of(x, weight, *moves, groups)), form)
    output = functional.conv2d(x, weight, bias, *moves, groups)
    ours = convolution.forward(x, weight, bias, *moves, False, [0, 0], groups)
    if form is not Stock:
        torch.testing.assert_close(ours, output)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, weight, bias], grad)
    found = convolution.backward(grad, x, weight, [out], *moves, False, [0, 0], groups, [True, True, True])
    for actual, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("stride", "padding", "spare"), [((1, 1), (0, 1), (0, 0)), ((2, 3), (1, 0), (1, 2))])
def test_gradients_of_a_transposed_convolution_are_autograds(groups, stride, padding, spare):
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 6 // groups, 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    output = functional.conv_transpose2d(x, weight, bias, stride, padding, spare, groups)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, weight, bias], grad)
    found = convolution.backward(
        grad, x, weight, [6], stride, padding, (1, 1), True, spare, groups, [True, True, True]
    )
    for actual, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize(
    "gradient",
    [
        stock.tapwise_weight_gradient,
        stock.rowwise_weight_gradient,
        stock.swapped_weight_gradient,
        stock.unfolded_weight_gradient,
    ],
)
def test_every_dense_form_of_the_weight_gradient_agrees(gradient):
    x = torch.randn(3, 5, 9, 8, dtype=torch.float64)
    weight = torch.randn(4, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    moves = ((2, 1), (1, 2), (1, 2), 1)
    output = functional.conv2d(x, weight, None, *moves)
    grad = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, [weight], grad)
    torch.testing.assert_close(gradient(grad, x, weight, Geometry.of(x, weight, *moves)), expected)


@pytest.mark.parametrize("make", [Rowwise, Toeplitz])
@pytest.mark.parametrize(
    "case", [name for name, case in CONVOLUTIONS.items() if case[0] in (Rowwise, Toeplitz)]
)
def test_both_depthwise_forms_agree_with_autograd_on_maps_of_any_size(make, case):
    _, batch, channels, _, height, width, kernel, *moves, groups = CONVOLUTIONS[case]
    x = torch.randn(batch, channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, 1, *kernel, dtype=torch.float64, requires_grad=True)
    check(make(Geometry.of(x, weight, *moves, groups)), x, weight, moves, groups)


@pytest.mark.parametrize("case", [name for name, case in CONVOLUTIONS.items() if case[-1] == 1])
def test_a_convolution_by_frequencies_and_its_gradients_are_autograds(case):
    _, batch, channels, out, height, width, kernel, *moves, _ = CONVOLUTIONS[case]
    x = torch.randn(batch, channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, channels, *kernel, dtype=torch.float64, requires_grad=True)
    check(spectral.spectral(Geometry.of(x, weight, *moves, 1), x), x, weight, moves, 1)


def check(form, x, weight, moves, groups):
    output = functional.conv2d(x, weight, None, *moves, groups)
    grad = torch.randn_like(output)
    by_x, by_weight = torch.autograd.grad(output, [x, weight], grad)
    torch.testing.assert_close(form.forward(x, weight), output)
    torch.testing.assert_close(form.input_gradient(grad, weight), by_x)
    torch.testing.assert_close(form.weight_gradient(grad, x, weight), by_weight)


def test_frequencies_do_not_pay_where_the_spectrum_of_the_kernels_is_huge():
    def form(channels):
        x, weight = torch.zeros(1, channels, 4, 4), torch.zeros(channels, channels, 3, 3)
        return form_of(weight, Geometry.of(x, weight, (1, 1), (1, 1), (1, 1), 1))

    assert isinstance(form(256), Spectral)
    assert isinstance(form(1024), Stock)


def test_frequencies_lose_no_more_to_rounding_than_a_sum_over_taps():
    x, weight = torch.randn(4, 32, 16, 16), torch.randn(64, 32, 5, 5)
    exact = functional.conv2d(x.double(), weight.double(), padding=2)
    form = spectral.spectral(Geometry.of(x, weight, (1, 1), (2, 2), (1, 1), 1), x)
    ours, theirs = form.forward(x, weight), functional.conv2d(x, weight, padding=2)
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()


AVERAGES = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": (3, 2), "stride": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
]


@pytest.mark.parametrize("size", [(9, 7), (8, 6)])
@pytest.mark.parametrize("options", AVERAGES)
def test_average_pooling_is_torchs(options, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    expected = functional.avg_pool2d(x, **options)
    kernel, stride, padding = (
        _pair(options.get(key, default))
        for key, default in (("kernel_size", 1), ("stride", options["kernel_size"]), ("padding", 0))
    )
    rest = (options.get("ceil_mode", False), options.get("count_include_pad", True), None)
    torch.testing.assert_close(pooling.average(x, kernel, stride, padding, *rest), expected)
    grad = torch.randn_like(expected)
    (reference,) = torch.autograd.grad(expected, [x], grad)
    torch.testing.assert_close(pooling.average_backward(grad, x, kernel, stride, padding, *rest), reference)


@pytest.mark.parametrize("out", [(1, 1), (3, 2), (7, 7), (12, 4)])
def test_adaptive_average_pooling_is_torchs(out):
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    expected = functional.adaptive_avg_pool2d(x, out)
    torch.testing.assert_close(pooling.adaptive_average(x, out), expected)
    grad = torch.randn_like(expected)
    (reference,) = torch.autograd.grad(expected, [x], grad)
    torch.testing.assert_close(pooling.adaptive_average_backward(grad, x), reference)


@pytest.mark.parametrize("pixels", ["all different", "many equal"])
@pytest.mark.parametrize("out", [(1, 1), (3, 2), (4, 5), (7, 7), (12, 4)])
def test_adaptive_max_pooling_is_torchs_ties_included(out, pixels):
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    x = (x if pixels == "all different" else x.round()).requires_grad_()
    expected = functional.adaptive_max_pool2d(x, out)
    found, indices = pooling.adaptive_maximum(x, out)
    assert torch.equal(found, expected)
    grad = torch.randn_like(expected)
    (reference,) = torch.autograd.grad(expected, [x], grad)
    torch.testing.assert_close(pooling.adaptive_maximum_backward(grad, x, indices), reference)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("widths", [(1, 2, 0, 3), (0, 0, 2, 2)])
def test_gradients_of_padding_by_the_map_itself_are_autograds(mode, widths):
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    padded = functional.pad(x, widths, mode)
    grad = torch.randn_like(padded)
    (expected,) = torch.autograd.grad(padded, [x], grad)
    chosen = padding.mirrored if mode == "reflect" else padding.nearest
    torch.testing.assert_close(padding.backward(chosen)(grad, x, widths), expected)


@pytest.mark.parametrize("correction", [0, 1, 2.5])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, [1], [0, 2]])
def test_variances_are_torchs(dim, correction, keepdim):
    x = torch.randn(4, 5, 6, dtype=torch.float64) + 3
    options = {"correction": correction, "keepdim": keepdim}
    torch.testing.assert_close(reductions.variance(x, dim, **options), torch.var(x, dim, **options))
    torch.testing.assert_close(
        reductions.variance_and_mean(x, dim, **options), torch.var_mean(x, dim, **options)
    )


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, [1], [0, -1]])
def test_norms_are_torchs(order, dim, keepdim):
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    expected = torch.linalg.vector_norm(x, order, dim, keepdim)
    torch.testing.assert_close(reductions.vector_norm(x, order, dim, keepdim), expected)
    assert reductions.vector_norm(x, 3) is NotImplemented


@pytest.mark.parametrize(
    ("shifts", "dims"), [((2,), (1,)), ((-1, 7), (0, -1)), ((0, 6), (0, 2)), ((17,), ())]
)
def test_what_rolls_is_torchs(shifts, dims):
    x = torch.randn(4, 5, 6)
    torch.testing.assert_close(slices.roll(x, shifts, dims), torch.roll(x, shifts, dims), rtol=0, atol=0)


def test_parts_are_torchs():
    x = torch.randn(4, 5, 6)
    for part, expected in zip(slices.split(x, [2, 0, 4], -1), x.split([2, 0, 4], -1), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)


@pytest.mark.parametrize("padding_index", [-1, 2])
def test_embedding_gradient_is_autograds(padding_index):
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[0, 2, 2], [4, 0, 0]])
    padding = None if padding_index < 0 else padding_index
    output = functional.embedding(indices, table, padding_idx=padding)
    grad = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, [table], grad)
    torch.testing.assert_close(embedding.backward(grad, indices, 5, padding_index, False), expected)


def test_relu_gradient_is_autograds_at_the_kink_too():
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    grad = torch.tensor([3.0, 4.0, 5.0])
    (expected,) = torch.autograd.grad(functional.relu(x), [x], grad)
    assert torch.equal(activations.threshold_backward(grad, x.detach(), 0), expected)


def test_relu6_gradient_is_autograds_at_both_kinks_too():
    x = torch.tensor([-1.0, 0.0, 2.0, 6.0, 7.0], requires_grad=True)
    grad = torch.arange(1.0, 6.0)
    (expected,) = torch.autograd.grad(functional.relu6(x), [x], grad)
    assert torch.equal(activations.hardtanh_backward(grad, x.detach(), 0, 6), expected)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def test_float32_stays_float32():
    x = torch.randn(1, 1, 4, 4)
    result: Tensor = pooling.average(x, (2, 2))
    assert result.dtype == torch.float32
