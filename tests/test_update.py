"""An update's arithmetic and what may not enter the sum."""

import numpy as np
import pytest

from edge_sdk.errors import TensorError
from edge_sdk.update import check_update, difference

RULES = {"w": "mean", "s": "statistic", "n": "counter"}
BOUNDS = {"mean": 6, "statistic": 20, "counter": 40}


def update(**values):
    return {"w": np.zeros(2, "f4"), "s": np.zeros(2, "f4"), "n": np.array(0), **values}


def test_an_update_is_what_came_minus_what_training_made_of_it():
    delta = difference({"w": np.float32([3, 1])}, {"w": np.float32([1, 4])})
    assert delta["w"].tolist() == [2, -3]


def test_an_update_is_paired_by_name():
    received = {"a": np.float32([1]), "b": np.float32([10])}
    delta = difference(received, {"b": np.float32([7]), "a": np.float32([0])})
    assert (delta["a"].tolist(), delta["b"].tolist()) == ([1], [3])


def test_an_update_keeps_the_dtypes():
    delta = difference(update(), update(n=np.array(7)))
    assert (delta["w"].dtype, delta["n"].dtype, int(delta["n"])) == (np.float32, np.int64, -7)


@pytest.mark.parametrize("value", [64.0, -64.0, 0.0, 1e-45])
def test_a_value_at_its_bound_is_taken(value):
    check_update(update(w=np.float32([0, value])), RULES, BOUNDS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("w", np.nextafter(np.float32(64), np.float32(65))), ("w", -65.0), ("s", 2.0**20 + 1), ("w", 3e38)],
)
def test_a_value_beyond_its_bound_is_refused_by_name(name, value):
    with pytest.raises(TensorError, match=f"'{name}' exceeds the bound"):
        check_update(update(**{name: np.float32([0, value])}), RULES, BOUNDS)


@pytest.mark.parametrize("count", [-(1 << 63), (1 << 63) - 1, 1 << 41])
def test_a_counter_beyond_its_bound_is_refused(count):
    with pytest.raises(TensorError, match="'n' exceeds"):
        check_update(update(n=np.array(count)), RULES, BOUNDS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    with pytest.raises(TensorError, match="NaN or infinite"):
        check_update(update(s=np.float32([value, 0])), RULES, BOUNDS)


def test_an_empty_tensor_exceeds_nothing():
    check_update({"w": np.zeros((0, 3), "f4")}, RULES, BOUNDS)
