"""Local momentum, the proximal term and clipping of the train program; the oracle is torch.optim."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch_oracle import Run, feed_of, random_batch, state_of

from edge_export import ExportError, export_bundle
from edge_sdk.bundle import Bundle

SHAPE = (3, 13, 11)


@pytest.fixture(scope="module")
def bundle(depthwise_model) -> Bundle:
    return export_bundle(depthwise_model, SHAPE, options=["clipping", "momentum", "proximal"])


def settings(model, momentum=0.0, proximal=0.0, clip_norm=3e38):
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    state = state_of(model)
    return {
        **{f"velocity/{name}": np.zeros_like(state[name]) for name in trainable},
        **{f"anchor/{name}": state[name] for name in trainable},
        "momentum": np.array(momentum, np.float32),
        "proximal": np.array(proximal, np.float32),
        "clip_norm": np.array(clip_norm, np.float32),
    }


def test_options_are_declared_in_a_fixed_order(bundle, depthwise):
    assert bundle.manifest.options == ("momentum", "proximal", "clipping")
    assert depthwise.manifest.options == ()


def test_options_that_are_off_change_nothing(bundle, depthwise, depthwise_model, run: Run):
    feed = feed_of(depthwise_model, random_batch(SHAPE, 4, 8))
    plain = run(depthwise.program("onnx", "train"), feed)
    off = run(bundle.program("onnx", "train"), feed | settings(depthwise_model))
    for name, value in plain.items():
        np.testing.assert_allclose(off[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "chosen", [{"momentum": 0.9}, {"proximal": 2.0}, {"clip_norm": 0.3}, {"momentum": 0.5, "clip_norm": 0.1}]
)
def test_five_steps_are_torchs(bundle, depthwise_model, run: Run, chosen):
    model = copy.deepcopy(depthwise_model).double().train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    anchors = [parameter.detach().clone() for parameter in trained]
    optimiser = torch.optim.SGD(trained, lr=0.1, momentum=chosen.get("momentum", 0), weight_decay=0.01)
    batch = random_batch(SHAPE, 4, 8)
    feed = feed_of(depthwise_model, batch) | settings(depthwise_model, **chosen)
    feed["weight_decay"] = np.array(0.01, np.float32)
    for _ in range(5):
        result = run(bundle.program("onnx", "train"), feed)
        feed |= {name.replace("new/", "weights/"): value for name, value in result.items()}
        feed |= {name.replace("new_", ""): value for name, value in result.items()}
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(torch.tensor(batch["x"]).double()), torch.tensor(batch["y"]))
        for parameter, anchor in zip(trained, anchors, strict=True):
            loss = loss + chosen.get("proximal", 0) / 2 * ((parameter - anchor) ** 2).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, chosen.get("clip_norm", 3e38))
        optimiser.step()
    for name, value in state_of(model).items():
        np.testing.assert_allclose(feed[f"weights/{name}"], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_an_unknown_option_is_refused(depthwise_model):
    with pytest.raises(ExportError, match="there is no option 'nesterov'"):
        export_bundle(depthwise_model, SHAPE, options=["nesterov"])
