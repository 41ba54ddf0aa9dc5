"""Fleets that train the head alone: over a wire, mixed, evaluated, calibrated, and in one process."""

import numpy as np
import pytest
import torch
from fleets import Fleet
from quadrants import quadrants
from torch import nn

from edge_export import export_bundle
from edge_sdk import Engine, Sharing
from edge_sdk.examples import FROZEN_BATCH, enter
from edge_sdk.manifest import Pipeline
from edge_sdk.protocol.messages import Offer
from edge_sdk.runtime import open_runtime
from edge_sdk.runtime.onnx import OnnxRuntime
from edge_server.evaluation import Evaluator
from edge_simulation import simulate

BOTH = ("onnx", "executorch")
TEST = quadrants(50, seed=20)


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(1, 16, 3, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU6(),
                nn.Conv2d(16, 8, 3, stride=2),
                nn.ReLU(),
                nn.Flatten(),
            ),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(8 * 4, 4)),
        )
        with torch.no_grad():
            net.train()(torch.tensor(quadrants(64).images)[:, None] / 255)
        return net


@pytest.fixture(scope="module")
def single(model):
    return export_bundle(model, (1, 8, 8), head_only="1", runtimes=BOTH, batch=16)


@pytest.fixture(scope="module")
def eight(model):
    calibration = quadrants(64, seed=30)
    return export_bundle(model, (1, 8, 8), head_only="1", runtimes=BOTH, batch=16, calibration=calibration)


@pytest.fixture(scope="module")
def cropped(model):
    """A model of 7 x 7 pixels, cut out and mirrored by chance."""
    return export_bundle(model, (1, 7, 7), pipeline=Pipeline((8, 8), flip=True), head_only="1")


def share_of(number):
    return quadrants(20 + number, seed=number)


def trained(folder, bundle, runtimes):
    """Weights after the rounds, and the lines of the rounds."""
    lines = []
    with Fleet(folder) as fleet:
        count = len(runtimes)
        _, serving = fleet.serve(
            bundle,
            rounds=2,
            participants=count,
            min_devices=count,
            epochs=2,
            evaluation="server",
            eval_data=TEST,
            on_round=lines.append,
        )
        for number, runtime in enumerate(runtimes):
            fleet.device(f"d{number}", share_of(number), engine=Engine(runtime=runtime, threads=1))
        return serving.result().bundle.weights, lines


@pytest.mark.parametrize(("bundle", "near"), [("single", 1e-5), ("eight", 2e-3)])
def test_a_mixed_fleet_trains_to_the_same_head(request, tmp_path, bundle, near):
    bundle = request.getfixturevalue(bundle)
    mixed, lines = trained(tmp_path / "mixed", bundle, ("onnx", "executorch", "executorch"))
    alone, expected = trained(tmp_path / "alone", bundle, ("onnx", "onnx", "onnx"))
    for name, before in bundle.weights.items():
        step = np.abs(alone[name] - before).max()
        assert step > 0, name
        np.testing.assert_allclose(mixed[name], alone[name], rtol=0, atol=near * max(step, 1), err_msg=name)
    assert [line.participants for line in lines] == [3, 3]
    for line, other in zip(lines, expected, strict=True):
        assert line.accuracy == pytest.approx(other.accuracy, abs=0.05)
        assert line.loss == pytest.approx(other.loss, rel=0.02)


def test_a_round_moves_the_head_alone(fleet, model, single):
    _, server = fleet.serve(single, participants=1, min_devices=1)
    fleet.device("d0", share_of(0))
    server.result()
    ((_, offer),) = fleet.heard(Offer)
    head, whole = (sum(t.numel() for t in part.state_dict().values()) for part in (model[1], model))
    assert 4 * head < offer.blob.size < 4 * head + 300
    assert head < whole / 8


def test_the_engine_has_the_bits_of_the_wire(fleet, cropped):
    settings = {
        "rounds": 3,
        "participants": 2,
        "min_devices": 3,
        "epochs": 2,
        "calibration": "ccvr",
        "virtual_features": 50,
        "evaluation": "server",
    }
    lines, data = [], {f"d{number}": share_of(number) for number in range(3)}
    _, server = fleet.serve(cropped, on_round=lines.append, eval_data=TEST, **settings)
    for name, mine in data.items():
        fleet.device(name, mine, sharing=Sharing(statistics=True, withhold_below=2))
    over_the_wire = server.result().bundle.weights
    simulated = simulate(cropped, fleet.config(**settings), data, eval_data=TEST, withhold_below=2)
    for name, expected in simulated.weights.items():
        np.testing.assert_array_equal(over_the_wire[name], expected, err_msg=name)
    assert any((simulated.trained[name] != weights).any() for name, weights in simulated.weights.items())
    for line, expected in zip(lines, simulated.rounds, strict=False):
        assert (line.accuracy, line.loss) == (expected.accuracy, expected.loss)


def test_devices_evaluate_what_they_hold_out(fleet, single):
    lines = []
    _, server = fleet.serve(single, rounds=2, evaluation="devices", on_round=lines.append)
    fleet.device("d0", share_of(30), held_out=0.4)
    server.result()
    assert all(0 <= line.accuracy <= 1 for line in lines)


@pytest.mark.parametrize("runtime", BOTH)
def test_a_client_predicts_from_images(fleet, single, runtime):
    _, server = fleet.serve(single)
    client = fleet.client("d0", share_of(0), engine=Engine(runtime=runtime, threads=1))
    fleet.start(client).result()
    trained = server.result().bundle
    opened = open_runtime(trained, threads=1)
    x, _ = enter(opened, trained.manifest, TEST, np.arange(len(TEST)))
    np.testing.assert_allclose(client.predict(TEST.images), opened.predict(x), rtol=1e-4, atol=1e-4)


def test_the_server_computes_its_features_once_for_the_run(single, monkeypatch):
    calls, backbone = [], OnnxRuntime.backbone

    def counted(self, images):
        calls.append(len(images))
        return backbone(self, images)

    monkeypatch.setattr(OnnxRuntime, "backbone", counted)
    evaluator = Evaluator(single, TEST, threads=1)
    before = evaluator.evaluate(single.weights)
    silenced = {name: np.zeros_like(value) for name, value in single.weights.items()}
    after = evaluator.evaluate(silenced)
    assert calls == [FROZEN_BATCH] * 3 + [2]
    assert before.loss != after.loss == pytest.approx(np.log(4))


def test_its_evaluation_is_pytorchs(model, single):
    found = Evaluator(single, TEST, threads=1).evaluate(single.weights)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(TEST.images)[:, None] / 255)
    expected = nn.functional.cross_entropy(logits, torch.tensor(TEST.labels))
    assert found.loss == pytest.approx(float(expected), rel=1e-4)
    assert found.accuracy == np.mean(logits.argmax(1).numpy() == TEST.labels)
