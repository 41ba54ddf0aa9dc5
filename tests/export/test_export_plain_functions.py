"""Functions in matrix products against PyTorch's kernels, in float64."""

import pytest
import torch
from torch.nn import functional

from edge_export.plain_functions import convolution, response_norm, transposed_convolution

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
