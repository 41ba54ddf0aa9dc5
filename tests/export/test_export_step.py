"""The four programs in ONNX Runtime; the oracle is PyTorch on the same batch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_oracle import Run, assert_steps_like_torch, feed_of, random_batch

from edge_sdk.bundle import Bundle

DIGITS, DEPTHWISE = ((1, 8, 8), 10), ((3, 13, 11), 4)


@pytest.mark.parametrize("samples", [1, 2, 7, 50])
def test_a_step_of_the_cnn_is_a_step_of_torch_sgd(digits, digits_model, run: Run, samples):
    batch = random_batch(*DIGITS, samples)
    result = run(digits.program("onnx", "train"), feed_of(digits_model, batch))
    assert_steps_like_torch(result, digits_model, batch)


@pytest.mark.parametrize("samples", [1, 2, 9, 32])
def test_a_step_of_a_batchnorm_net_is_a_step_of_torch_sgd(depthwise, depthwise_model, run: Run, samples):
    batch = random_batch(*DEPTHWISE, samples)
    result = run(depthwise.program("onnx", "train"), feed_of(depthwise_model, batch))
    assert_steps_like_torch(result, depthwise_model, batch)


def test_ten_steps_in_a_row_follow_torch(digits, digits_model, run: Run):
    model = copy.deepcopy(digits_model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = random_batch(*DIGITS, 16)
    feed = feed_of(model, batch)
    losses, expected = [], []
    for _ in range(10):
        result = run(digits.program("onnx", "train"), feed)
        feed |= {name.replace("new/", "weights/"): value for name, value in result.items()}
        losses.append(result["loss_sum"] / 16)
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(torch.tensor(batch["x"])), torch.tensor(batch["y"]))
        loss.backward()
        optimiser.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_weight_decay_is_that_of_torch_sgd(depthwise, depthwise_model, run: Run):
    batch = random_batch(*DEPTHWISE, 8)
    feed = feed_of(depthwise_model, batch) | {"weight_decay": np.array(0.3, np.float32)}
    result = run(depthwise.program("onnx", "train"), feed)
    assert_steps_like_torch(result, depthwise_model, batch, weight_decay=0.3)


def test_a_frozen_parameter_passes_through_unchanged(depthwise, depthwise_model, run: Run):
    feed = feed_of(depthwise_model, random_batch(*DEPTHWISE, 8))
    feed |= {"weight_decay": np.array(0.3, np.float32)}
    result = run(depthwise.program("onnx", "train"), feed)
    assert np.array_equal(result["new/stem.weight"], depthwise_model.stem.weight.detach().numpy())


def test_the_batch_counter_goes_up_by_one(depthwise, depthwise_model, run: Run):
    result = run(depthwise.program("onnx", "train"), feed_of(depthwise_model, random_batch(*DEPTHWISE, 8)))
    assert result["new/norm.num_batches_tracked"] == 1
    assert result["new/norm.num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize("name", ["digits", "depthwise"])
def test_samples_of_weight_zero_leave_no_trace(name, request, run: Run):
    bundle: Bundle = request.getfixturevalue(name)
    model: nn.Module = request.getfixturevalue(f"{name}_model")
    kept = random_batch(*(DIGITS if name == "digits" else DEPTHWISE), 6)
    padding = {"x": np.full((3, *kept["x"].shape[1:]), 5, np.float32), "y": np.zeros(3, np.int64)}
    padded = {key: np.concatenate([kept[key], padding[key]]) for key in kept}
    weight = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0], np.float32)
    feed = feed_of(model, padded | {"sample_weight": weight})
    assert_steps_like_torch(run(bundle.program("onnx", "train"), feed), model, kept)


def test_an_integer_weight_counts_a_sample_so_often(digits, digits_model, run: Run):
    batch = random_batch(*DIGITS, 4)
    feed = feed_of(digits_model, batch | {"sample_weight": np.array([1, 3, 0, 1], np.float32)})
    repeated = {key: values[[0, 1, 1, 1, 3]] for key, values in batch.items()}
    assert_steps_like_torch(run(digits.program("onnx", "train"), feed), digits_model, repeated)


def test_train_counts_the_hits_of_positive_weight(digits, digits_model, run: Run):
    batch = random_batch(*DIGITS, 40)
    weight = np.arange(40, dtype=np.float32) % 3
    with torch.no_grad():
        batch["y"][:30] = digits_model(torch.tensor(batch["x"])).argmax(1).numpy()[:30]
    result = run(digits.program("onnx", "train"), feed_of(digits_model, batch | {"sample_weight": weight}))
    with torch.no_grad():
        hits = digits_model(torch.tensor(batch["x"])).argmax(1).numpy() == batch["y"]
    assert result["correct"] == (hits & (weight > 0)).sum()


def test_evaluate_gives_torchs_loss_and_hits_in_eval_mode(depthwise, depthwise_model, run: Run):
    model = copy.deepcopy(depthwise_model)
    with torch.no_grad():  # statistics other than those of a new model
        model.train()(torch.randn(8, 3, 13, 11) * 3)
    batch = random_batch(*DEPTHWISE, 21)
    weight = np.linspace(0, 1, 21, dtype=np.float32)
    result = run(depthwise.program("onnx", "evaluate"), feed_of(model, batch | {"sample_weight": weight}))
    with torch.no_grad():
        logits = model.eval()(torch.tensor(batch["x"]))
    losses = functional.cross_entropy(logits, torch.tensor(batch["y"]), reduction="none").numpy()
    np.testing.assert_allclose(result["loss_sum"], (losses * weight).sum(), rtol=1e-5)
    assert result["correct"] == ((logits.argmax(1).numpy() == batch["y"]) & (weight > 0)).sum()


@pytest.mark.parametrize("samples", [1, 5])
def test_predict_gives_the_eager_logits(depthwise, depthwise_model, run: Run, samples):
    batch = random_batch(*DEPTHWISE, samples)
    result = run(depthwise.program("onnx", "predict"), feed_of(depthwise_model, batch))
    with torch.no_grad():
        logits = copy.deepcopy(depthwise_model).eval()(torch.tensor(batch["x"])).numpy()
    np.testing.assert_allclose(result["logits"], logits, rtol=1e-4, atol=1e-5)


def test_embed_gives_what_enters_the_head(digits, digits_model, run: Run):
    batch = random_batch(*DIGITS, 5)
    result = run(digits.program("onnx", "embed"), feed_of(digits_model, batch))
    with torch.no_grad():
        features = digits_model.features(torch.tensor(batch["x"])).numpy()
    np.testing.assert_allclose(result["features"], features, rtol=1e-4, atol=1e-5)
