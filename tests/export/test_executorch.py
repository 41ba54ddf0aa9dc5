"""Bundles for ExecuTorch, run as devices run them; ONNX Runtime and torch.optim.SGD are the oracles."""

import gc

import msgspec
import numpy as np
import pytest
import torch
from quadrants import quadrants
from test_executorch_decompositions import ALL
from torch import nn
from torch_oracle import assert_steps_like_torch, feed_of, random_batch

from edge_export import export_bundle, models
from edge_export.classifier import examine
from edge_export.describe import DescriberSettings
from edge_export.errors import ExportError
from edge_export.executorch import kernels, lowering
from edge_export.pretrained import mobilenet_v2
from edge_export.programs import all_programs
from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.features import open_describer
from edge_sdk.manifest import Input
from edge_sdk.runtime import Optimiser, open_runtime
from edge_sdk.runtime.executorch import OpenProgram

SHAPE, BATCH = (1, 8, 8), 12
OPTIONS = Optimiser(lr=0.1, weight_decay=0.01, momentum=0.9, proximal=0.1, clip_norm=1.0)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return export_bundle(
        net,
        SHAPE,
        runtimes=("onnx", "executorch"),
        batch=BATCH,
        options=("momentum", "proximal", "clipping"),
    )


@pytest.fixture
def both(bundle):
    return open_runtime(bundle, "onnx", threads=1), open_runtime(bundle, "executorch", threads=1)


def batches(bundle, *sizes):
    rng = np.random.default_rng(1)
    for size in sizes:
        x = rng.standard_normal((size, *SHAPE), np.float32)
        noise = [rng.random((size, *drawn.shape), np.float32) for drawn in bundle.manifest.noise]
        yield x, rng.integers(10, size=size), np.ones(size, np.float32), noise


def differences(one, other):
    return {name: np.abs(one[name] - value).max() for name, value in other.items()}


def test_training_is_that_of_onnx_runtime_with_partial_batches_too(bundle, both):
    for x, y, weight, noise in batches(bundle, 12, 5, 12, 1, 7):
        sums = [runtime.train_step(x, y, weight, OPTIONS, noise) for runtime in both]
        assert sums[0].loss == pytest.approx(sums[1].loss, rel=1e-5)
        assert sums[0][1:] == sums[1][1:]
    weights = [runtime.get_weights() for runtime in both]
    assert max(differences(*weights).values()) < 1e-6
    assert weights[1]["1.num_batches_tracked"] == 5
    assert min(differences(weights[1], bundle.weights).values()) > 0
    velocities = [runtime.get_velocity() for runtime in both]
    assert max(differences(*velocities).values()) < 1e-5


def test_evaluation_prediction_and_features_take_any_number_of_images(bundle, both):
    ((x, y, _, _),) = batches(bundle, 30)
    for runtime in both:
        runtime.set_weights(bundle.weights)
    sums = [runtime.evaluate(x, y) for runtime in both]
    assert (sums[0].loss, *sums[0][1:]) == pytest.approx((sums[1].loss, *sums[1][1:]), rel=1e-5)
    for method in ("predict", "embed"):
        found = [getattr(runtime, method)(x) for runtime in both]
        assert found[0].shape == found[1].shape
        np.testing.assert_allclose(*found, atol=1e-5)


def test_a_round_begins_without_velocity_and_goes_on_with_what_it_is_given(bundle, both):
    _, runtime = both
    ((x, y, weight, noise),) = batches(bundle, 12)
    runtime.train_step(x, y, weight, OPTIONS, noise)
    reached, velocity = runtime.get_weights(), runtime.get_velocity()
    runtime.train_step(x, y, weight, OPTIONS, noise)
    further = runtime.get_weights()
    runtime.set_weights(bundle.weights)
    assert not any(part.any() for part in runtime.get_velocity().values())
    runtime.go_on(reached)
    runtime.set_velocity(velocity)
    runtime.train_step(x, y, weight, OPTIONS, noise)
    assert max(differences(runtime.get_weights(), further).values()) == 0


def test_what_it_gives_is_a_copy(bundle, both):
    _, runtime = both
    for part in runtime.get_weights().values():
        part += 1
    assert max(differences(runtime.get_weights(), bundle.weights).values()) == 0


def test_the_program_stays_alive_with_its_runtime(bundle):
    runtime = open_runtime(Bundle.read(bundle.data), "executorch")
    gc.collect()
    assert runtime.predict(np.zeros((1, *SHAPE), np.float32)).shape == (1, 10)


def test_more_examples_than_the_program_takes_are_refused(bundle, both):
    ((x, y, weight, noise),) = batches(bundle, 13)
    with pytest.raises(BundleError, match="take 12 examples, a batch has 13: export it with --batch 13"):
        both[1].train_step(x, y, weight, OPTIONS, noise)


def test_a_program_that_is_none_is_refused():
    with pytest.raises(BundleError, match="cannot be opened by this ExecuTorch"):
        OpenProgram(b"no program" * 100, "mine", threads=0)


@pytest.mark.parametrize(
    "wrong",
    [{"options": ()}, {"noise": ()}, {"input": Input((1, 8, 9), (0.0,), (1.0,))}],
    ids=["options", "noise", "input"],
)
def test_programs_that_do_not_keep_to_the_manifest_are_refused(bundle, wrong):
    manifest = msgspec.structs.replace(bundle.manifest, **wrong)
    other = Bundle.build(
        manifest, bundle.weights, {p: bundle.member(p) for p in bundle.manifest.members if "/" in p}
    )
    with pytest.raises(BundleError, match=r"the \w+ program of .* takes or gives other tensors than"):
        open_runtime(other, "executorch")


def test_execution_providers_are_not_executorchs(bundle):
    with pytest.raises(RuntimeUnavailableError, match="executorch has none"):
        open_runtime(bundle, "executorch", providers=["CPUExecutionProvider"])


def test_a_bundle_for_onnx_alone_says_how_to_export_it_for_both():
    bundle = export_bundle(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), SHAPE)
    with pytest.raises(
        BundleError, match="holds no executorch programs, only onnx: export it with --runtime"
    ):
        open_runtime(bundle, "executorch")


def test_phones_have_all_that_a_program_needs(bundle):
    from executorch.exir._serialize import _deserialize_pte_binary

    program = _deserialize_pte_binary(bundle.program("executorch", "train")).program
    assert {plan.name for plan in program.execution_plan} == {"train", "evaluate", "predict", "embed"}
    assert set(kernels.operators(program)) <= kernels.android_kernels()
    delegates = {delegate.id for plan in program.execution_plan for delegate in plan.delegates}
    assert delegates == {"XnnpackBackend"}


def test_an_operator_that_no_phone_has_is_named_with_its_module():
    class Sorted(nn.Module):
        def forward(self, x):
            return torch.cumprod(x, 1)

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), Sorted(), nn.Linear(6, 4))
    with pytest.raises(ExportError, match=r"2: aten\.cumprod is not covered"):
        export_bundle(net, SHAPE, runtimes=("executorch",), batch=2)


@pytest.mark.parametrize("wrong", [{"runtimes": ()}, {"runtimes": ("tflite",)}, {"batch": 0}])
def test_what_cannot_be_exported_is_said(wrong):
    with pytest.raises(ExportError, match=r"take of onnx, executorch|give 1 or more"):
        export_bundle(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), SHAPE, **{"runtimes": ("executorch",), **wrong}
        )


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, len(ALL), 5))
def test_every_layer_lowered_is_that_of_torch_in_a_second_call_too(first):
    nets, made = {}, {}
    for name in list(ALL)[first : first + 5]:
        torch.manual_seed(3)
        model = ALL[name]()
        shape = (3, 9, 9 if isinstance(model, models.CifarCNN) else 7)
        model(torch.zeros(2, *shape))
        nets[name] = model, shape
        made[name] = all_programs(examine(model, shape), batch=6)["train"]
    lowered = lowering.lower({name: lowering.trace(program) for name, program in made.items()})
    opened = OpenProgram(lowered, "all", threads=1)
    for name, (model, shape) in nets.items():
        names = list(made[name].run(made[name].arguments))
        for seed in (0, 1):
            batch = random_batch(shape, 4, 6, seed)
            feed = feed_of(model, batch)
            results = opened.run(name, [torch.tensor(feed[key]) for key in made[name].arguments])
            found = dict(zip(names, (result.numpy() for result in results), strict=True))
            assert_steps_like_torch(found, model, batch)


@pytest.mark.full
def test_devices_of_both_runtimes_describe_their_data_alike():
    bundle = export_bundle(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4)),
        SHAPE,
        runtimes=("onnx", "executorch"),
        batch=4,
        describe=DescriberSettings(weights=mobilenet_v2(seed=0), size=32),
    )
    data = quadrants(20)
    features = [
        open_describer(bundle, runtime, threads=1).mean_feature(data, np.arange(20))
        for runtime in ("onnx", "executorch")
    ]
    assert np.abs(features[0]).max() > 0
    np.testing.assert_allclose(*features, atol=1e-4 * np.abs(features[0]).max())
