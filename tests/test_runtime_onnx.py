"""A bundle in ONNX Runtime: steps that repeat, weights that stay put, memory that does not grow."""

import resource

import msgspec
import numpy as np
import pytest

from edge_sdk import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.manifest import Input, Programs
from edge_sdk.runtime import Optimiser, open_runtime

SGD = Optimiser(lr=0.1)


def batch(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((samples, 1, 8, 8), np.float32)
    return x, generator.integers(4, size=samples), np.ones(samples, np.float32)


def test_the_same_steps_give_the_same_bits(norm):
    runs = []
    for _ in range(2):
        runtime = open_runtime(norm, threads=1)
        sums = [runtime.train_step(*batch(samples, samples), SGD) for samples in (8, 8, 3, 1)]
        runs.append((sums, runtime.get_weights()))
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert np.array_equal(value, runs[1][1][name])


def test_new_weights_between_steps_are_those_that_the_next_step_starts_from(norm):
    fresh, used = open_runtime(norm, threads=1), open_runtime(norm, threads=1)
    for _ in range(3):  # an odd number, so that the spare buffers are the current ones
        used.train_step(*batch(8), SGD)
    used.set_weights(norm.weights)
    assert used.train_step(*batch(5), SGD) == fresh.train_step(*batch(5), SGD)
    for name, value in fresh.get_weights().items():
        assert np.array_equal(used.get_weights()[name], value)


def test_weights_that_were_read_do_not_change_with_later_steps(norm):
    runtime = open_runtime(norm, threads=1)
    before = runtime.get_weights()
    copies = {name: value.copy() for name, value in before.items()}
    runtime.train_step(*batch(8), SGD)
    runtime.train_step(*batch(8), SGD)
    assert all(np.array_equal(before[name], copies[name]) for name in before)
    assert all(np.array_equal(norm.weights[name], copies[name]) for name in before)


def test_the_rate_is_that_of_each_step(norm):
    runtime = open_runtime(norm, threads=1)
    runtime.train_step(*batch(8), Optimiser(lr=0.5))
    moved = runtime.get_weights()
    runtime.train_step(*batch(8), Optimiser(lr=0.0))
    assert np.array_equal(runtime.get_weights()["head.weight"], moved["head.weight"])


def test_a_provider_that_is_not_there_is_an_error_that_names_those_that_are(norm):
    with pytest.raises(RuntimeUnavailableError, match=r"TensorrtExecutionProvider .*CPUExecutionProvider"):
        open_runtime(norm, providers=["TensorrtExecutionProvider"])


def test_an_option_that_the_bundle_lacks_is_refused(norm):
    with pytest.raises(BundleError, match="without the option momentum"):
        open_runtime(norm).train_step(*batch(4), Optimiser(lr=0.1, momentum=0.9))


def _use(runtime, method):
    x, y, weight = batch(4)
    arguments = {"train_step": (x, y, weight, SGD), "evaluate": (x, y)}.get(method, (x,))
    return getattr(runtime, method)(*arguments)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        (
            "train_step",
            {"options": ("momentum",)},
            r"train program does not give 'new_velocity/conv\.weight'",
        ),
        ("train_step", {"parameters": "counted"}, r"takes 'weights/norm\.num_batches_tracked' as int64 \[\]"),
        ("evaluate", {"input": Input((1, 9, 8), (0.0,), (1.0,))}, r"takes 'x' as float32 \[batch, 1, 8, 8\]"),
        ("predict", {"runtimes": "turned"}, r"predict program gives 'features' as float32 \[batch, 36\]"),
        ("embed", {"runtimes": "turned"}, r"embed program takes 'y' as int64 \[batch\]"),
    ],
)
def test_a_program_that_does_not_keep_to_the_manifest_is_refused(norm, method, wrong, message):
    train, evaluate, predict, embed = msgspec.structs.astuple(norm.manifest.runtimes["onnx"])
    others = {
        "turned": {"onnx": Programs(train=train, evaluate=predict, predict=embed, embed=evaluate)},
        "counted": norm.manifest.parameters[:-1],
    }
    changes = {
        field: others.get(value, value) if isinstance(value, str) else value for field, value in wrong.items()
    }
    manifest = msgspec.structs.replace(norm.manifest, **changes)
    weights = {spec.name: norm.weights[spec.name] for spec in manifest.specs}
    programs = {path: norm.member(path) for path in (train, evaluate, predict, embed)}
    bundle = Bundle.build(manifest, weights, programs)
    with pytest.raises(BundleError, match=message):
        _use(open_runtime(bundle, threads=1), method)
    _use(open_runtime(norm, threads=1), method)


def _growth(norm, steps: int) -> float:
    """MB by which the process's peak grows after the first 200 of ``steps`` steps, of several batch sizes."""
    runtime = open_runtime(norm, threads=1)
    for step in range(steps):
        if step == 200:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        runtime.train_step(*batch(1 + step % 7, step), SGD)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_memory_does_not_grow_over_a_thousand_steps(norm):
    assert _growth(norm, 1_200) < 2


@pytest.mark.full
def test_memory_does_not_grow_over_ten_thousand_steps(norm):
    assert _growth(norm, 10_200) < 2
