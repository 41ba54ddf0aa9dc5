"""The models of the papers: their sizes as published, and the usual names of their weights."""

import pytest
import torch

from edge_export import models


@pytest.mark.parametrize(
    ("model", "shape", "weights"),
    [
        (models.CifarCNN(), (3, 24, 24), 1_068_298),
        (models.WideCNN(), (3, 32, 32), 2_156_490),
        (models.CcvrCNN(), (3, 32, 32), 62_006 - 850 + 84 * 85 + 256 * 85 + 2_570),
        (models.MobileNetV2(1000), (3, 32, 32), 3_504_872),
    ],
)
def test_a_model_is_as_large_as_published_and_gives_logits(model, shape, weights):
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    logits = model(torch.zeros(2, *shape))
    assert logits.shape == (2, model.head.out_features)


def test_mobilenet_v2_has_torchvisions_names():
    names = models.MobileNetV2().state_dict().keys()
    assert len(names) == 314
    assert next(iter(names)) == "features.0.0.weight"
    assert {"features.1.conv.0.0.weight", "features.1.conv.2.running_var", "features.18.1.bias"} <= names
    assert list(names)[-2:] == ["classifier.1.weight", "classifier.1.bias"]
