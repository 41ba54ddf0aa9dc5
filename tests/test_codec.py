import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_sdk.codec import pack, quantise, sent_specs, unpack
from edge_sdk.errors import TensorError
from edge_sdk.manifest import Parameter
from edge_sdk.tensors import encode

PARAMETERS = (
    Parameter("conv", (4, 3, 3, 3), "float32", "mean"),
    Parameter("bias", (4,), "float32", "mean"),
    Parameter("running", (4,), "float32", "statistic"),
    Parameter("seen", (), "int64", "counter"),
)
LIMIT = 1 << 20


def update(seed=0, scale=0.1):
    rng = np.random.default_rng(seed)
    return {
        "conv": (scale * rng.standard_normal((4, 3, 3, 3))).astype(np.float32),
        "bias": (scale * rng.standard_normal(4)).astype(np.float32),
        "running": rng.standard_normal(4).astype(np.float32),
        "seen": np.array(-3),
    }


def travelled(tensors, codec, *, seed=0, residual=None, compression="none"):
    sent, lost = quantise(tensors, PARAMETERS, codec, seed=seed, residual=residual)
    return unpack(pack(sent, compression), PARAMETERS, codec, compression, limit=LIMIT), lost


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_fp32_is_the_same_bits(compression):
    arrived, lost = travelled(update(), "fp32", compression=compression)
    assert lost == {}
    for name, tensor in update().items():
        np.testing.assert_array_equal(arrived[name], tensor)


def test_fp16_is_numpys_nearest_half():
    arrived, _ = travelled(update(), "fp16")
    np.testing.assert_array_equal(arrived["conv"], update()["conv"].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_running_statistics_and_counters_travel_as_they_are(codec):
    arrived, lost = travelled(update(), codec)
    for name in ("running", "seen"):
        np.testing.assert_array_equal(arrived[name], update()[name])
    assert lost.keys() == {"conv", "bias"}


def test_int8_is_within_a_step_of_each_channels_own_scale():
    arrived, _ = travelled(update(), "int8")
    exact = update()["conv"]
    steps = np.abs(exact).reshape(4, -1).max(axis=1) / 127
    assert (np.abs(arrived["conv"] - exact).reshape(4, -1).max(axis=1) <= steps * 1.0001).all()


def test_the_largest_weight_of_a_channel_is_exact_in_int8():
    exact = update()["conv"].reshape(4, -1)
    arrived = travelled(update(), "int8")[0]["conv"].reshape(4, -1)
    largest = np.abs(exact).argmax(axis=1)
    np.testing.assert_allclose(arrived[range(4), largest], exact[range(4), largest], rtol=1e-6)


def test_the_mean_of_many_roundings_is_the_exact_value():
    mean = np.mean([travelled(update(), "int8", seed=seed)[0]["conv"] for seed in range(2000)], axis=0)
    step = np.abs(update()["conv"]).max() / 127
    # The deviation of a rounding is at most half a step.
    assert np.abs(mean - update()["conv"]).max() < 5 * step / 2 / np.sqrt(2000)


def test_the_same_seed_rounds_the_same():
    first, second = (travelled(update(), "int8", seed=7)[0]["conv"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_what_is_lost_is_made_up_for_by_the_next_update(codec):
    arrived, residual, exact = np.zeros((4, 3, 3, 3)), None, np.zeros((4, 3, 3, 3))
    for seed in range(50):
        one, residual = travelled(update(seed), codec, seed=seed, residual=residual)
        arrived += one["conv"]
        exact += update(seed)["conv"]
    # All that is missing of the sum of fifty updates is the last residual.
    np.testing.assert_allclose(arrived + residual["conv"], exact, atol=1e-5)


@given(arrays(np.float32, (2, 5), elements=st.floats(-64, 64, width=32)))
def test_every_finite_update_travels(values):
    parameters = (Parameter("w", (2, 5), "float32", "mean"),)
    sent, lost = quantise({"w": values}, parameters, "int8", seed=0)
    arrived = unpack(pack(sent, "none"), parameters, "int8", "none", limit=LIMIT)["w"]
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(arrived - values) <= step * 1.001 + 1e-30).all()
    np.testing.assert_array_equal(lost["w"], values - arrived)


def test_an_update_of_zeros_stays_zero():
    parameters = (Parameter("w", (2, 2), "float32", "mean"),)
    sent, _ = quantise({"w": np.zeros((2, 2), np.float32)}, parameters, "int8", seed=0)
    assert not unpack(pack(sent, "none"), parameters, "int8", "none", limit=LIMIT)["w"].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_what_half_precision_cannot_hold_is_refused(value):
    with pytest.raises(TensorError, match="'bias' holds NaN or infinite"):
        quantise({**update(), "bias": np.full(4, value, np.float32)}, PARAMETERS, "fp16", seed=0)


def test_one_byte_a_weight_and_four_a_channel():
    specs = {spec.name: spec.nbytes for spec in sent_specs(PARAMETERS, "int8")}
    assert specs == {"conv": 108, "scale/conv": 16, "bias": 4, "scale/bias": 4, "running": 16, "seen": 8}


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        ({"scale/conv": np.full(4, np.nan, np.float32)}, "scales that are not finite"),
        ({"scale/conv": np.full(4, -1, np.float32)}, "below 0"),
        ({"scale/conv": np.ones(3, np.float32)}, r"expected float32 \[4\]"),
        ({"conv": np.zeros((4, 3, 3, 3), np.float32)}, "expected int8"),
        ({"surplus": np.zeros(1, np.int8)}, "not part of this model"),
    ],
)
def test_what_the_codec_does_not_make_is_refused(lie, complaint):
    sent, _ = quantise(update(), PARAMETERS, "int8", seed=0)
    with pytest.raises(TensorError, match=complaint):
        unpack(encode({**sent, **lie}), PARAMETERS, "int8", "none", limit=LIMIT)


def test_a_frame_that_would_expand_beyond_the_limit_is_refused_before_it_does():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(TensorError, match="declares 67108864 bytes, over the limit"):
        unpack(bomb, PARAMETERS, "fp32", "zstd", limit=LIMIT)


def test_a_frame_that_does_not_say_its_size_is_refused():
    import zstandard

    anonymous = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 100)
    with pytest.raises(TensorError, match="declares"):
        unpack(anonymous, PARAMETERS, "fp32", "zstd", limit=LIMIT)


@pytest.mark.parametrize("cut", [1, 10, -1])
def test_a_damaged_frame_is_refused(cut):
    data = pack(update(), "zstd")
    with pytest.raises(TensorError, match=r"damaged|declares"):
        unpack(data[:cut], PARAMETERS, "fp32", "zstd", limit=LIMIT)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (0, 3, 3)])
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_tensor_without_elements_travels(codec, shape):
    parameters = (Parameter("w", shape, "float32", "mean"),)
    sent, lost = quantise({"w": np.zeros(shape, np.float32)}, parameters, codec, seed=0)
    arrived = unpack(pack(sent, "none"), parameters, codec, "none", limit=LIMIT)["w"]
    assert (arrived.shape, arrived.dtype, lost["w"].shape) == (shape, np.float32, shape)
