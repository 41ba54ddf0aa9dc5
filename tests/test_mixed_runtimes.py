"""A fleet whose devices run the same model in ONNX Runtime and in ExecuTorch."""

import numpy as np
import pytest
import torch
from fleets import Fleet
from quadrants import quadrants
from torch import nn

from edge_export import export_bundle
from edge_sdk import Engine
from edge_sdk.protocol.messages import Offer

ROUNDS = 2


@pytest.fixture(scope="module")
def bundle():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten(), nn.Linear(144, 4)
        )
    return export_bundle(model, (1, 8, 8), name="mixed", runtimes=("onnx", "executorch"), batch=16)


def trained(folder, bundle, runtimes):
    """Weights after the rounds, and the updates that were offered, by device and round."""
    with Fleet(folder) as fleet:
        _, serving = fleet.serve(
            bundle, rounds=ROUNDS, participants=len(runtimes), min_devices=len(runtimes), batch_size=8
        )
        for number, runtime in enumerate(runtimes):
            engine = Engine(runtime=runtime, threads=1)
            fleet.device(f"d{number}", quadrants(20 + number, seed=number), engine=engine)
        outcome = serving.result()
        return outcome.bundle.weights, [device for device, _ in fleet.heard(Offer)]


def test_they_train_the_same_rounds_to_the_same_model(tmp_path, bundle):
    mixed, offered = trained(tmp_path / "mixed", bundle, ("onnx", "executorch", "executorch"))
    alone, _ = trained(tmp_path / "alone", bundle, ("onnx", "onnx", "onnx"))
    assert sorted(set(offered)) == ["d0", "d1", "d2"]
    for name, before in bundle.weights.items():
        step = np.abs(alone[name] - before).max()
        assert step > 0, name
        np.testing.assert_allclose(mixed[name], alone[name], rtol=0, atol=1e-5 * max(step, 1), err_msg=name)
