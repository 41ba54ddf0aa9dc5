"""BatchNorm with weights, and the functional step in float64; the oracle is PyTorch's own layer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_oracle import Depthwise

from edge_export.layers import WeightedBatchNorm
from edge_export.training_step import split_state, training_step

torch.manual_seed(0)


def test_at_equal_weights_batchnorm_is_torchs():
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    theirs = nn.BatchNorm2d(3, dtype=torch.float64)
    nn.init.normal_(theirs.weight)
    ours = copy.deepcopy(theirs)
    expected = theirs(x)
    with WeightedBatchNorm(torch.full((5,), 1.0, dtype=torch.float64)):
        found = ours(x)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x], grad), torch.autograd.grad(expected, [x], grad)
    )


def test_a_sample_of_weight_zero_moves_no_statistic():
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64)
    theirs = nn.BatchNorm2d(3, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    expected = theirs(x[:3])
    with WeightedBatchNorm(torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)):
        found = ours(x)
    torch.testing.assert_close(found[:3], expected)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_batchnorm_over_one_pixel_of_a_single_sample_stays_finite():
    with WeightedBatchNorm(torch.ones(1)):
        layer = nn.BatchNorm2d(2)
        layer(torch.randn(1, 2, 1, 1))
    assert torch.isfinite(layer.running_var).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_the_functional_step_is_torch_sgd_to_float64_rounding(weight_decay):
    model = Depthwise().double().train()
    x, y = torch.randn(6, 3, 9, 7, dtype=torch.float64), torch.randint(4, (6,))
    params, buffers = split_state(copy.deepcopy(model))
    ones, scalars = torch.ones(6, dtype=torch.float64), torch.tensor([0.3, weight_decay], dtype=torch.float64)
    result = training_step(model, params, buffers, x, y, ones, scalars[0], scalars[1])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trainable, lr=0.3, weight_decay=weight_decay)
    functional.cross_entropy(model(x), y).backward()
    optimiser.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close({**result.params, **result.buffers}[name], tensor)
