"""Every layer as ExecuTorch's programs have it, before they are lowered; the oracle is torch.optim.SGD."""

import numpy as np
import pytest
import torch
from test_export_operators import NETS
from torch import nn
from torch_oracle import Depthwise, assert_steps_like_torch, feed_of, random_batch

from edge_export import models
from edge_export.classifier import examine
from edge_export.executorch import lowering
from edge_export.programs import all_programs

MORE = {
    "batch norm, depthwise, a residual, a frozen layer": Depthwise,
    "depthwise with a multiplier, stride and dilation": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, dilation=2, padding=2),
        nn.Conv2d(6, 6, (3, 2), groups=6, stride=(2, 1)),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "transposed convolutions in groups and by channel": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.ConvTranspose2d(4, 6, (3, 2), stride=2, groups=2, dilation=(1, 2)),
        nn.ConvTranspose2d(6, 6, 3, stride=(1, 2), padding=1, groups=6),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "a pool whose last window is cut off": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "thresholds": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Threshold(0.1, 0.0), nn.Hardtanh(-0.2, 0.3), nn.Flatten(), nn.LazyLinear(4)
    ),
}
ALL = {**NETS, **MORE}


def traced(model, shape, samples):
    """The train program before it is lowered, as a function of arrays by name, and its graph."""
    program = all_programs(examine(model, shape), batch=samples)["train"]
    module, names = lowering.plain_graph(program), list(program.run(program.arguments))

    def step(feed):
        results = module(*(torch.tensor(feed[name]) for name in program.arguments))
        return dict(zip(names, (result.numpy() for result in results), strict=True))

    return step, module.graph


@pytest.mark.parametrize("name", ALL)
def test_a_step_is_a_step_of_torch_sgd(name):
    torch.manual_seed(3)
    model = ALL[name]()
    shape = (3, 9, 9 if isinstance(model, models.CifarCNN) else 7)
    model(torch.zeros(2, *shape))  # gives lazy layers a size
    for samples in (2, 6):
        step, graph = traced(model, shape, samples)
        batch = random_batch(shape, 4, samples)
        assert_steps_like_torch(step(feed_of(model, batch)), model, batch)
        called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
        assert not {op for op in called if "convolution" in op or "max_pool" in op or "addmm" in op}


@pytest.mark.parametrize("samples", range(1, 7))
def test_padding_leaves_no_trace(samples):
    torch.manual_seed(3)
    model = Depthwise()
    step, _ = traced(model, (3, 9, 7), 6)
    batch = random_batch((3, 9, 7), 4, samples)
    filled = {name: np.concatenate([part, part[:1].repeat(6 - samples, 0)]) for name, part in batch.items()}
    weight = (np.arange(6) < samples).astype(np.float32)
    result = step(feed_of(model, filled | {"sample_weight": weight}))
    assert_steps_like_torch(result, model, batch)
