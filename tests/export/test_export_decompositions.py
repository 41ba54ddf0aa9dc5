"""Each formulation of a gradient against PyTorch's autograd in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from edge_export.decompositions import activations, convolution, embedding, pooling, spectral
from edge_export.decompositions.convolution import Geometry

torch.manual_seed(0)

# name: batch, channels, out channels, height, width, kernel, stride, padding, dilation, groups
CONVOLUTIONS = {
    "odd map, stride 2": (2, 3, 4, 9, 7, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a row that no window reaches": (2, 3, 4, 8, 10, (3, 3), (2, 3), (0, 0), (1, 1), 1),
    "by frequencies, batch of 1": (1, 16, 5, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many channels, stride 2, dilated": (3, 17, 4, 11, 9, (3, 2), (2, 1), (2, 1), (2, 2), 1),
    "1x1, large map": (2, 3, 4, 9, 7, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1, small map": (2, 16, 24, 2, 2, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1, stride 2": (2, 3, 4, 9, 7, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "depthwise": (2, 6, 6, 9, 7, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "depthwise, stride 2, dilated": (2, 6, 6, 10, 9, (3, 3), (2, 2), (2, 2), (2, 2), 6),
    "depthwise, large odd map": (3, 4, 4, 17, 15, (3, 5), (1, 1), (1, 2), (1, 1), 4),
    "depthwise, large map, stride 2, dilated": (2, 4, 4, 24, 23, (3, 3), (2, 2), (2, 1), (2, 1), 4),
    "depthwise, one pixel": (3, 4, 4, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise, padding beyond the kernel": (2, 4, 4, 5, 5, (2, 2), (1, 1), (2, 2), (1, 1), 4),
    "two channels out for each in": (2, 4, 8, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "groups": (3, 6, 9, 8, 7, (3, 3), (2, 1), (1, 0), (1, 1), 3),
    "by frequencies": (3, 16, 24, 9, 8, (5, 3), (1, 1), (2, 1), (1, 1), 1),
    "by frequencies, no padding, dilated": (2, 8, 8, 12, 11, (5, 5), (1, 1), (0, 0), (1, 2), 1),
    "by frequencies, stride 2": (2, 32, 32, 8, 9, (5, 5), (2, 2), (2, 2), (1, 1), 1),
}
BY_FREQUENCIES = {name for name in CONVOLUTIONS if name.startswith("by frequencies")}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_gradients_are_autograds(case):
    batch, channels, out, height, width, kernel, stride, padding, dilation, groups = CONVOLUTIONS[case]
    x = torch.randn(batch, channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, channels // groups, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(out, dtype=torch.float64, requires_grad=True)
    output = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    ours = convolution.forward(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)
    if ours is not NotImplemented:
        torch.testing.assert_close(ours, output)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, weight, bias], grad)
    found = convolution.backward(
        grad, x, weight, [out], stride, padding, dilation, False, [0, 0], groups, [True, True, True]
    )
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
    "form",
    [
        convolution.tapwise_weight_gradient,
        convolution.rowwise_weight_gradient,
        convolution.swapped_weight_gradient,
    ],
)
def test_every_dense_form_of_the_weight_gradient_agrees(form):
    x = torch.randn(3, 5, 9, 8, dtype=torch.float64)
    weight = torch.randn(4, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    geometry = Geometry((2, 1), (1, 2), (1, 2), 1)
    output = functional.conv2d(x, weight, None, *geometry)
    grad = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, [weight], grad)
    torch.testing.assert_close(form(grad, x, weight, geometry), expected)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_dense_kernels_that_are_large_for_their_maps_are_applied_by_frequencies(case):
    _, channels, out, *size, kernel, stride, padding, dilation, groups = CONVOLUTIONS[case]
    x, weight = torch.zeros(1, channels, *size), torch.zeros(out, channels // groups, *kernel)
    expected = functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    found = spectral.pays(weight.shape, tuple(size), tuple(expected.shape[2:]), stride, padding)
    assert (found and groups == 1) == (case in BY_FREQUENCIES)


def test_frequencies_do_not_pay_where_the_spectrum_of_the_kernels_is_huge():
    assert spectral.pays((256, 256, 3, 3), (4, 4), (4, 4), (1, 1), (1, 1))
    assert not spectral.pays((1024, 1024, 3, 3), (4, 4), (4, 4), (1, 1), (1, 1))


@pytest.mark.parametrize("case", [name for name in CONVOLUTIONS if CONVOLUTIONS[name][-1] == 1])
def test_a_convolution_by_frequencies_and_its_gradients_are_autograds(case):
    batch, channels, out, *size, kernel, stride, padding, dilation, _ = CONVOLUTIONS[case]
    x = torch.randn(batch, channels, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, channels, *kernel, dtype=torch.float64, requires_grad=True)
    output = functional.conv2d(x, weight, None, stride, padding, dilation)
    grad = torch.randn_like(output)
    by_x, by_weight = torch.autograd.grad(output, [x, weight], grad)
    by = spectral.spectra(kernel, tuple(size), tuple(output.shape[2:]), stride, padding, dilation, x)
    torch.testing.assert_close(spectral.forward(x, weight, by, output.shape[2:]), output)
    torch.testing.assert_close(spectral.input_gradient(grad, weight, by, tuple(size)), by_x)
    torch.testing.assert_close(spectral.weight_gradient(grad, x, weight, by), by_weight)


def test_frequencies_lose_no_more_to_rounding_than_a_sum_over_taps():
    x, weight = torch.randn(4, 32, 16, 16), torch.randn(64, 32, 5, 5)
    exact = functional.conv2d(x.double(), weight.double(), padding=2)
    by = spectral.spectra((5, 5), (16, 16), (16, 16), (1, 1), (2, 2), (1, 1), x)
    ours, theirs = spectral.forward(x, weight, by, (16, 16)), functional.conv2d(x, weight, padding=2)
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
