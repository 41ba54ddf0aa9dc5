"""Bundles whose backbone is frozen: PyTorch with the same layers frozen is the oracle, in both runtimes."""

import builtins
import copy
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from quadrants import quadrants
from torch import nn
from torch_oracle import Run, assert_steps_like_torch, feed_of, random_batch

from edge_export import ExportError, export_bundle, inference_onnx
from edge_export.models.mobilenet_v2 import InvertedResidual, MobileNetV2
from edge_sdk.bundle import Bundle
from edge_sdk.cli import main
from edge_sdk.data import ArrayDataset, as_dataset, save_npz
from edge_sdk.errors import DataError
from edge_sdk.examples import FROZEN_BATCH, enter
from edge_sdk.manifest import Pipeline
from edge_sdk.runtime import open_runtime

SHAPE, CLASSES, BATCH = (1, 8, 8), 4, 8
BOTH = ("onnx", "executorch")
PLACE = {"mean": [0.3], "std": [0.4]}
DATA = quadrants(60, seed=3)


class Residual(nn.Module):
    """MobileNetV2 in small: BatchNorm, ReLU6 in place, depthwise convolutions, a sum of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
            InvertedResidual(8, 8, 1, 4),
            InvertedResidual(8, 16, 2, 4),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """In train mode, with running statistics of images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Residual().train()
        for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
        with torch.no_grad():
            for seed in range(20):
                net(images_of(quadrants(32, seed=seed)))
        return net


def images_of(data) -> torch.Tensor:
    return (torch.tensor(data.images)[:, None] / 255 - 0.3) / 0.4


@pytest.fixture(scope="module")
def single(model) -> Bundle:
    return export_bundle(model, SHAPE, head_only="classifier", runtimes=BOTH, batch=BATCH, **PLACE)


@pytest.fixture(scope="module")
def eight(model) -> Bundle:
    options = {"head_only": "classifier", "calibration": quadrants(100, seed=9), **PLACE}
    return export_bundle(model, SHAPE, runtimes=BOTH, batch=BATCH, **options)


def expected_of(model) -> np.ndarray:
    """Features of DATA in PyTorch."""
    with torch.no_grad():
        return model.eval().features(images_of(DATA)).mean((2, 3)).numpy()


def features_of(bundle, runtime) -> np.ndarray:
    opened = open_runtime(bundle, runtime, threads=1)
    return enter(opened, bundle.manifest, DATA, np.arange(len(DATA)))[0]


def share(found, expected) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("runtime", BOTH)
def test_features_are_pytorchs(model, single, runtime):
    np.testing.assert_allclose(features_of(single, runtime), expected_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("runtime", BOTH)
def test_features_of_eight_bits_are_near_pytorchs(model, eight, runtime):
    assert 1e-4 < share(features_of(eight, runtime), expected_of(model)) < 0.1


def test_both_runtimes_have_the_same_eight_bits_but_for_a_few_roundings(eight):
    one, other = (features_of(eight, runtime) for runtime in BOTH)
    assert share(one, other) < 0.01
    assert (one == other).mean() > 0.5


def operators_in_onnx_runtime(bundle, folder) -> Counter:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    ort.InferenceSession(bundle.backbone("onnx"), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node)


def test_onnx_runtime_computes_convolutions_in_integers(eight, tmp_path):
    operators = operators_in_onnx_runtime(eight, tmp_path)
    assert (operators["QLinearConv"], operators["Conv"]) == (7, 0)


@pytest.mark.full
def test_mobilenet_v2_is_frozen_to_integers_in_both_runtimes(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net, pixels = MobileNetV2(CLASSES), quadrants(96, seed=4)
    data = ArrayDataset(
        pixels.images.repeat(4, axis=1).repeat(4, axis=2)[..., None].repeat(3, axis=3), pixels.labels
    )
    with torch.no_grad():
        for _ in range(20):
            net.train()(torch.tensor(data.images).permute(0, 3, 1, 2) / 255)
    bundle = export_bundle(
        net, (3, 32, 32), head_only="classifier", calibration=data, runtimes=BOTH, batch=BATCH
    )
    assert bundle.manifest.nbytes == 4 * CLASSES * 1281
    assert 2_000_000 < len(bundle.backbone("onnx")) < 3_000_000
    operators = operators_in_onnx_runtime(bundle, tmp_path)
    assert (operators["QLinearConv"], operators["Conv"]) == (52, 0)
    one, other = (
        enter(open_runtime(bundle, runtime, threads=1), bundle.manifest, data, np.arange(40))[0]
        for runtime in BOTH
    )
    with torch.no_grad():
        exact = net.eval().embed(torch.tensor(data.images[:40]).permute(0, 3, 1, 2) / 255).numpy()
    assert share(one, other) < 0.1
    assert share(one, exact) < 0.5


def test_phones_have_all_that_eight_bits_need(eight):
    from executorch.exir._serialize import _deserialize_pte_binary

    from edge_export.executorch import kernels

    program = _deserialize_pte_binary(eight.backbone("executorch")).program
    (plan,) = program.execution_plan
    assert plan.name == "backbone"
    assert set(kernels.operators(program)) <= {"aten::mean.out"} | kernels.android_kernels()
    assert not any("quantize" in name for name in kernels.operators(program))


def test_only_the_heads_parameters_are_in_the_bundle_by_the_names_of_the_whole(model, single):
    assert list(single.weights) == [f"classifier.{name}" for name, _ in model.classifier.named_parameters()]
    assert (single.manifest.entering, single.manifest.feature_size) == ((16,), 12)
    assert single.manifest.head == ("classifier.3.weight", "classifier.3.bias")
    assert single.manifest.input.shape == SHAPE
    whole = sum(tensor.numel() for tensor in model.state_dict().values())
    assert single.manifest.nbytes < 4 * whole / 5


def test_a_step_is_pytorchs_with_the_rest_frozen(model, single, run: Run):
    head = nn.Sequential()
    head.add_module("classifier", copy.deepcopy(model.classifier[1:]))  # under their own numbers
    batch = random_batch((16,), CLASSES, 6)
    feed = feed_of(head, batch) | {"noise0": np.ones((6, 16), np.float32)}
    result = run(single.program("onnx", "train"), feed)
    # Nothing was dropped; what is left is scaled all the same.
    assert_steps_like_torch(result, head, batch | {"x": batch["x"] / np.float32(0.7)})


@pytest.mark.parametrize("bundle", ["single", "eight"])
def test_the_file_for_inference_takes_raw_images_and_predicts_as_the_parts_do(request, bundle, run: Run):
    bundle = request.getfixturevalue(bundle)
    runtime = open_runtime(bundle, threads=1)
    x, _ = enter(runtime, bundle.manifest, DATA, np.arange(20))
    raw = DATA.images[:20, None].astype(np.float32) / np.float32(255)
    found = run(inference_onnx(bundle), {"x": raw})["logits"]
    np.testing.assert_allclose(found, runtime.predict(x), rtol=1e-3, atol=1e-3)


def test_the_file_for_inference_cuts_the_middle_out_before_the_backbone(model, run: Run):
    bundle = export_bundle(model, (1, 6, 6), pipeline=Pipeline((8, 8), flip=True), head_only="classifier")
    raw = DATA.images[:5, None].astype(np.float32) / np.float32(255)
    with torch.no_grad():
        expected = model.eval()(torch.tensor(raw)[:, :, 1:7, 1:7]).numpy()
    found = run(inference_onnx(bundle), {"x": raw})["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_maps_may_enter_the_head(model):
    whole = nn.Sequential(
        model.features, nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 4))
    )
    bundle = export_bundle(whole, SHAPE, head_only="1", runtimes=BOTH)
    assert (bundle.manifest.entering, bundle.manifest.feature_size) == ((16, 4, 4), 256)
    x, _ = enter(open_runtime(bundle, threads=1), bundle.manifest, DATA, np.arange(FROZEN_BATCH + 3))
    with torch.no_grad():
        plain = torch.tensor(DATA.images[: FROZEN_BATCH + 3, None]) / 255
        np.testing.assert_allclose(x, whole[0].eval()(plain).numpy(), rtol=1e-4, atol=1e-5)


def test_the_same_model_gives_the_same_bytes(model, eight):
    options = {"head_only": "classifier", "calibration": quadrants(100, seed=9), **PLACE}
    assert export_bundle(model, SHAPE, runtimes=BOTH, batch=BATCH, **options).data == eight.data


def test_of_many_images_some_calibrate_by_the_seed(model, monkeypatch):
    monkeypatch.setattr("edge_export.bundle.CALIBRATION", 30)
    many = quadrants(40, seed=9)
    made = [
        export_bundle(model, SHAPE, head_only="classifier", calibration=many, seed=seed).member(
            "onnx/backbone.onnx"
        )
        for seed in (0, 0, 1)
    ]
    assert made[0] == made[1] != made[2]


# What is refused.


class Around(nn.Module):
    """A head with something done around it."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten())
        self.head = nn.Linear(36, 4)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


class TwoInputs(nn.Linear):
    def forward(self, x, other):
        return super().forward(x + other)


def taking(forward, head):
    model = Around(forward)
    model.head = head
    return model


REFUSALS = {
    "no such module": (
        lambda: Around(lambda m, x: m.head(m.stem(x))),
        "tail",
        r"no module 'tail', but stem, head",
    ),
    "the whole model": (lambda: Around(lambda m, x: m.head(m.stem(x))), "", "names the whole model"),
    "a softmax after it": (
        lambda: Around(lambda m, x: m.head(m.stem(x)).softmax(1)),
        "head",
        "something follows the head",
    ),
    "it runs twice": (
        lambda: Around(lambda m, x: m.head(m.stem(x)) + 0 * m.head(m.stem(x))),
        "head",
        "must run once in a forward pass, it runs 2 times",
    ),
    "it does not run": (
        lambda: Around(lambda m, x: nn.functional.linear(m.stem(x), m.head.weight)),
        "head",
        "it runs 0 times",
    ),
    "it takes two tensors": (
        lambda: taking(lambda m, x: m.head(m.stem(x), m.stem(x)), TwoInputs(36, 4)),
        "head",
        "one tensor .* and nothing else",
    ),
    "it takes no batch": (
        lambda: taking(lambda m, x: m.head(m.stem(x)[:1]).expand(len(x), 4), nn.Linear(36, 4)),
        "head",
        r"\[1, 36\] for 2 images",
    ),
    "it is no classifier": (
        lambda: taking(lambda m, x: m.head(m.stem(x).unflatten(1, (4, 9))), nn.Conv1d(4, 4, 9)),
        "head",
        r"returns \[2, 4, 1\]",
    ),
    "no linear layer in it": (
        lambda: taking(
            lambda m, x: m.head(m.stem(x).unflatten(1, (4, 9))),
            nn.Sequential(nn.Conv1d(4, 4, 9), nn.Flatten()),
        ),
        "head",
        "no nn.Linear",
    ),
    "the model looks into it": (
        lambda: Around(lambda m, x: m.head(m.stem(x) * m.head.weight.sum())),
        "head",
        "the model looks into its head",
    ),
    "statistics of the batch before it": (
        lambda: Around(lambda m, x: m.head(nn.functional.batch_norm(m.stem(x), None, None, training=True))),
        "head",
        "look across the batch",
    ),
    "a mean over the batch before it": (
        lambda: Around(lambda m, x: m.head(m.stem(x) - m.stem(x).mean(0))),
        "head",
        "other features in ONNX Runtime than in PyTorch",
    ),
    "a batch that is fixed": (
        lambda: Around(lambda m, x: m.head(m.stem(x) * (1 + torch.zeros(int(x.shape[0]), 1)))),
        "head",
        "fixes it",
    ),
    "random numbers before it": (
        lambda: Around(lambda m, x: m.head(m.stem(x) + torch.rand(x.shape[0], 1))),
        "head",
        "draws random numbers|something follows",
    ),
    "features that are not finite for some images": (
        lambda: Around(lambda m, x: m.head(m.stem(x) + torch.where(x.amax((2, 3)) > 3.7, float("inf"), 0.0))),
        "head",
        "not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_model_that_does_not_end_in_its_head_is_refused(case):
    make, path, message = REFUSALS[case]
    with pytest.raises(ExportError, match=message):
        export_bundle(make(), SHAPE, head_only=path)


def test_calibration_is_for_a_frozen_part(model):
    with pytest.raises(ExportError, match="give head_only too"):
        export_bundle(model, SHAPE, calibration=DATA)


def test_images_that_do_not_fit_do_not_calibrate(model):
    for wrong, message in ((as_dataset([(np.zeros((5, 5)), 0)]), r"shape \[5, 5\]"), ([], "empty")):
        with pytest.raises(DataError, match=message):
            export_bundle(model, SHAPE, head_only="classifier", calibration=wrong)


def test_features_that_eight_bits_cannot_hold_are_refused():
    faint = Around(lambda m, x: m.head(m.stem(x)))
    torch.nn.init.constant_(faint.stem[1].weight, 1e-7)
    with pytest.raises(ExportError, match="int8 features lie 100% of their norm from those in float32"):
        export_bundle(faint, SHAPE, head_only="head", calibration=DATA)


def test_without_torchao_the_export_says_what_int8_takes(model, monkeypatch):
    imported = builtins.__import__

    def missing(name, *rest):
        if name.startswith("torchao"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ExportError, match=r"int8 needs torchao .*\[export,executorch\]"):
        export_bundle(model, SHAPE, head_only="classifier", calibration=DATA)


# On the command line.


def test_the_command_freezes_and_calibrates(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    save_npz(tmp_path / "some.npz", DATA)
    command = ["export", "mine:make", "--input", "1x8x8", "--classes", "4", "--head-only", "3"]
    assert main([*command, "--int8", "some.npz", "-o", "mine.edge"]) == 0
    bundle = Bundle.read(tmp_path / "mine.edge")
    assert list(bundle.weights) == ["3.weight", "3.bias"]
    kinds = {node.op_type for node in onnx.load_model_from_string(bundle.backbone("onnx")).graph.node}
    assert {"QuantizeLinear", "Conv"} <= kinds
    assert main(["inspect", "mine.edge"]) == 0
    assert "frozen, gives 144 float32" in capsys.readouterr().out


def test_the_command_wants_a_frozen_part_for_int8(tmp_path, capsys):
    command = ["export", "mine:make", "--input", "1x8x8", "--classes", "4", "--int8", "x.npz", "-o", "m.edge"]
    assert main(command) == 2
    assert "give --head-only" in capsys.readouterr().err
