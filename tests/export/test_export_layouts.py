"""Permutations that cancel out are gone, those that are needed are left, and nothing else changes."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from edge_export.layouts import without_permutations

aten = torch.ops.aten
LAST, FIRST = (1, 2, 3, 0), (3, 0, 1, 2)


def fakes(*tensors):
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]


def inside(x):
    return x.permute(LAST)


def outside(x):
    return x.permute(FIRST)


def repeated(x):
    return x.sum((2, 3), keepdim=True).expand(x.shape)


# What is computed on x [3, 4, 5, 6] and a vector v [4]; the permutations that must be left.
CASES = {
    "there and back": (lambda x, v: outside(torch.relu(inside(x))), 0),
    "two of the same": (lambda x, v: outside(inside(x) + inside(x * 2)), 0),
    "a factor by channel": (lambda x, v: outside(inside(x * v.view(4, 1, 1)) + v.view(4, 1, 1, 1)), 0),
    "sums by channel": (lambda x, v: inside(x).permute(FIRST).sum((0, 2, 3)) * v, 0),
    "sums that keep their axes": (lambda x, v: outside(inside(x)).sum((0, 2), keepdim=True), 0),
    "means of planes": (lambda x, v: outside(torch.relu(inside(x))).mean((2, 3)), 0),
    "planes as a matrix": (lambda x, v: outside(torch.relu(inside(x))).flatten(2).sum(2), 0),
    "a linear layer": (lambda x, v: x.flatten(1) @ x.flatten(1)[:2].t(), 1),
    # The result alone is turned, not what enters and not the weight.
    "a linear layer on maps": (lambda x, v: outside(torch.exp(x)).flatten(1) @ x.view(6, 60)[:2].t(), 1),
    "one that is needed": (lambda x, v: inside(x).reshape(4, -1), 1),
    "what no rule knows": (lambda x, v: outside(torch.cumsum(inside(x), 0)), 2),
    "an activation in place": (lambda x, v: torch.relu_(outside(torch.exp(inside(x)))), 0),
    "what is repeated": (lambda x, v: outside(torch.relu(inside(x))) * repeated(x) / 7, 0),
    "what is repeated, turned": (lambda x, v: outside(inside(x) + inside(repeated(x))), 0),
    "what is repeated alone": (lambda x, v: (repeated(x) / 7).sum((2, 3)), 0),
    "axes of one": (lambda x, v: inside(x.sum((2, 3), keepdim=True)).reshape(4, 3), 1),
    "of other numbers": (lambda x, v: torch.where(outside(inside(x)) > 0, x, v.view(4, 1, 1)), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_same_with_no_more_permutations_than_it_takes(name):
    function, left = CASES[name]
    x, v = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(1)), torch.arange(4.0)
    graph = make_fx(torch.func.functionalize(lambda *args: (function(*args),)))(x.clone(), v)
    rid = without_permutations(graph, fakes(x, v), {})
    (found,), (expected,) = rid(x, v), (function(x.clone(), v),)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    turned = [node for node in rid.graph.nodes if node.target is aten.permute_copy.default]
    assert len(turned) == left


def test_what_an_operator_repeats_is_not_copied():
    x, v = torch.randn(3, 4, 5, 6), torch.randn(4)
    graph = make_fx(CASES["what is repeated"][0])(x, v)
    assert aten.expand.default in {node.target for node in graph.graph.nodes}
    rid = without_permutations(graph, fakes(x, v), {})
    assert aten.expand_copy.default not in {node.target for node in rid.graph.nodes}


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_views_and_permutations_gives_the_same(seed):
    draw = random.Random(seed)
    plans = [
        (draw.choice(["permute", "pointwise", "merge", "split", "sum"]), [draw.random() for _ in range(8)])
        for _ in range(8)
    ]

    def function(x):
        for step, plan in plans:
            if step == "permute":
                x = x.permute(*sorted(range(x.dim()), key=plan.__getitem__))
            elif step == "pointwise":
                x = torch.tanh(x) * x.shape[-1] + plan[0]
            elif step == "merge" and x.dim() > 1:
                at = int(plan[0] * (x.dim() - 1))
                x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
            elif step == "split" and x.shape[0] % 2 == 0 and x.dim() < 7:
                x = x.reshape(2, -1, *x.shape[1:])
            elif step == "sum" and x.dim() > 2:
                x = x.sum(int(plan[0] * x.dim()), keepdim=plan[1] > 0.5)
        return (x,)

    x = torch.randn(4, 1, 6, 2, generator=torch.Generator().manual_seed(seed))
    graph = make_fx(function)(x)
    torch.testing.assert_close(without_permutations(graph, fakes(x), {})(x), function(x))
