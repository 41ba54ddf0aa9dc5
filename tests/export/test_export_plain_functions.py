"""Functions in matrix products against PyTorch's kernels, in float64."""

import pytest
import torch
from torch.nn import functional

from edge_export.interpolation import interpolate
from edge_export.plain_functions import convolution, instance_norm, pad, response_norm, transposed_convolution

torch.manual_seed(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": (1,), "dilation": [2]},
        {"groups": 2, "padding": "valid"},
        {"padding": "same"},
    ],
)
def test_a_convolution_over_one_axis_is_torchs(options):
    x = torch.randn(2, 4, 11, dtype=torch.float64)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(
        convolution(x, weight, bias, **options), functional.conv1d(x, weight, bias, **options)
    )


@pytest.mark.parametrize("options", [{}, {"stride": (3,), "padding": 2, "output_padding": 1, "dilation": 2}])
def test_a_transposed_convolution_over_one_axis_is_torchs(options):
    x, weight = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(4, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(
        transposed_convolution(x, weight, **options), functional.conv_transpose1d(x, weight, **options)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("beta", [0.75, 0.5])
def test_local_response_normalisation_is_torchs(size, beta):
    x = torch.randn(2, 7, 5, 3, dtype=torch.float64, requires_grad=True)
    expected = functional.local_response_norm(x, size, alpha=0.3, beta=beta, k=1.5)
    found = response_norm(x, size, 0.3, beta, 1.5)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x], grad), torch.autograd.grad(expected, [x], grad)
    )


@pytest.mark.parametrize("affine", [False, True])
def test_instance_normalisation_is_torchs(affine):
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    scale_and_shift = torch.randn(2, 4, dtype=torch.float64) if affine else (None, None)
    torch.testing.assert_close(
        instance_norm(x, None, None, *scale_and_shift, eps=0.1),
        functional.instance_norm(x, None, None, *scale_and_shift, eps=0.1),
    )


@pytest.mark.parametrize("widths", [(1, 2, 0, 0), (0, 3, 2, 0), (3, 0, 0, 5), (0, 0, 1, 1)])
def test_padding_that_wraps_around_is_torchs(widths):
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(pad(x, widths, "circular"), functional.pad(x, widths, "circular"))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "corners"])
@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("factor", [0.3, 1, 1.7, 2.6, 3])
@pytest.mark.parametrize("height", [4, 7, 16])
def test_maps_of_another_size_are_torchs(mode, recompute, factor, height):
    x = torch.randn(2, 3, height, 5, dtype=torch.float64)
    corners = {"mode": "bilinear", "align_corners": True} if mode == "corners" else {"mode": mode}
    options = {"scale_factor": (factor, 2), "recompute_scale_factor": recompute, **corners}
    torch.testing.assert_close(interpolate(x, **options), functional.interpolate(x, **options))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("size", range(1, 40, 3))
def test_rows_of_another_size_are_torchs(mode, size):
    for length in range(1, 20):
        x = torch.randn(2, 3, length)
        expected = functional.interpolate(x, size, mode=mode)
        torch.testing.assert_close(interpolate(x, size, mode=mode), expected, rtol=0, atol=1e-5)


def test_maps_of_another_size_in_ways_that_are_not_covered_are_torchs_own():
    x = torch.randn(2, 3, 4, 5)
    for options in ({"mode": "bicubic"}, {"mode": "bilinear", "antialias": True}):
        expected = functional.interpolate(x, (3, 7), **options)
        torch.testing.assert_close(interpolate(x, (3, 7), **options), expected, rtol=0, atol=0)
