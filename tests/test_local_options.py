"""Local momentum, the proximal term and clipping, from the run's settings to a device's update."""

import copy

import numpy as np
import pytest
import torch
from fleets import Fleet
from quadrants import quadrants
from torch import nn
from torch.nn import functional

from edge_export import export_bundle
from edge_sdk import Bundle, RunError
from edge_sdk.data import batches
from edge_sdk.protocol.messages import Task

DATA = quadrants(37)
LR = 0.05


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(108, 4))


@pytest.fixture(scope="module")
def bundle(model) -> Bundle:
    return export_bundle(model, (1, 8, 8), name="optioned", options=("momentum", "proximal", "clipping"))


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def rounds_over_the_wire(fleet, bundle, **settings):
    """The weights after the run, and the tasks of its rounds in order."""
    _, server = fleet.serve(bundle, lr=LR, epochs=2, **settings)
    fleet.device("d", DATA)
    weights = server.result().bundle.weights
    tasks = {task.round: task for _, task in fleet.heard(Task)}
    return weights, [tasks[number] for number in sorted(tasks)]


def rounds_in_torch(model, tasks, *, momentum=0.0, keep=False, proximal=0.0, clip_norm=None):
    """The same rounds of the one device in plain PyTorch, by name of the weight."""
    model = copy.deepcopy(model).train()
    images, labels = torch.tensor(DATA.images).float().unsqueeze(1) / 255, torch.tensor(DATA.labels)
    optimiser = None
    for task in tasks:
        received = [parameter.detach().clone() for parameter in model.parameters()]
        if optimiser is None or not keep:
            optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        for batch in batches(37, batch_size=8, epochs=2, seed=task.seed):
            optimiser.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            pairs = zip(model.parameters(), received, strict=True)
            loss = loss + proximal / 2 * sum(((now - then) ** 2).sum() for now, then in pairs)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimiser.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def assert_same(weights, expected, model):
    for name, start in model.named_parameters():
        moved = np.abs(expected[name] - start.detach().numpy()).max()
        assert np.abs(weights[name] - expected[name]).max() <= 1e-4 * moved, name


def test_the_three_together_are_what_pytorch_makes_of_them(fleet, bundle, model):
    settings = {"local_momentum": 0.9, "proximal": 0.5, "clip_norm": 0.2}
    weights, tasks = rounds_over_the_wire(fleet, bundle, **settings)
    assert_same(weights, rounds_in_torch(model, tasks, momentum=0.9, proximal=0.5, clip_norm=0.2), model)


def test_without_settings_the_options_change_nothing(fleet, bundle, model):
    weights, tasks = rounds_over_the_wire(fleet, bundle)
    assert_same(weights, rounds_in_torch(model, tasks), model)


@pytest.mark.parametrize("keep", [False, True])
def test_the_velocity_begins_at_0_or_where_the_last_round_left_it(keep, fleet, bundle, model):
    settings = {"local_momentum": 0.9, "keep_momentum": keep, "rounds": 3}
    weights, tasks = rounds_over_the_wire(fleet, bundle, **settings)
    assert_same(weights, rounds_in_torch(model, tasks, momentum=0.9, keep=keep), model)


@pytest.mark.parametrize("option", ["local_momentum", "proximal", "clip_norm"])
def test_a_bundle_without_the_option_is_refused_at_the_start(option, fleet, cnn):
    with pytest.raises(RunError, match="export it with --options"):
        fleet.serve(cnn, **{option: 0.5})
