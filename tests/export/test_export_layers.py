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


def test_a_single_value_a_channel_gives_zeros_and_leaves_the_running_variance():
    layer = nn.BatchNorm2d(2)
    layer.running_var.fill_(3.0)
    with WeightedBatchNorm(torch.tensor([1.0, 0.0])):
        output = layer(torch.randn(2, 2, 1, 1))
    assert torch.equal(output[0], torch.zeros(2, 1, 1))
    assert torch.equal(layer.running_var, torch.full((2,), 3.0))
    assert not torch.equal(layer.running_mean, torch.zeros(2))


@pytest.mark.parametrize("size", [(), (3,), (4, 2), (16, 9)])
def test_batchnorm_gradients_by_all_its_inputs_are_torchs_with_samples_left_out(size):
    x = torch.randn(5, 3, *size, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept = torch.tensor([True, False, True, True, False])
    expected = functional.batch_norm(x[kept], None, None, scale, shift, training=True)
    with WeightedBatchNorm(kept.to(torch.float64)):
        found = functional.batch_norm(x, None, None, scale, shift, training=True)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(found[kept], expected)
    for ours, theirs in zip(
        torch.autograd.grad(found[kept], [x, scale, shift], grad),
        torch.autograd.grad(expected, [x, scale, shift], grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


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
