import numpy as np
import pytest

from edge_server.chain import Chain


def weights(value):
    return {"w": np.float32([value]), "n": np.int64(10)}


def step(value):
    return {"w": np.float32([value]), "n": np.int64(-1)}


def test_weights_pass_along_the_chain_and_the_mediators_update_is_their_sum():
    chain = Chain(["a", "b"], weights(1.0))
    chain.forward(step(0.25), 3)
    assert (chain.device, chain.weights["w"][0], chain.weights["n"]) == ("b", 0.75, 11)
    chain.forward(step(0.5), 4)
    assert chain.device is None
    assert (chain.update()["w"][0], chain.update()["n"]) == (0.75, -2)


def test_a_device_counts_once_however_often_it_has_its_turn():
    chain = Chain(["a", "b"], weights(0.0), passes=3)
    turns = []
    while chain.device is not None:
        turns.append(chain.device)
        chain.forward(step(0.0), {"a": 3, "b": 4}[chain.device])
    assert turns == ["a", "b"] * 3
    assert (chain.examples, chain.delivered) == (7, ["a", "b"])


def test_the_next_device_gets_the_last_good_weights_where_one_is_skipped():
    chain = Chain(["a", "b", "c"], weights(1.0))
    chain.forward(step(0.5), 3)
    chain.skip()
    assert (chain.device, chain.weights["w"][0]) == ("c", 0.5)
    chain.forward(step(0.25), 5)
    assert (chain.examples, chain.update()["w"][0]) == (8, 0.75)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_chain_of_which_nobody_delivers_has_no_weight(passes):
    chain = Chain(["a", "b"], weights(1.0), passes=passes)
    for _ in range(2 * passes):
        chain.skip()
    assert (chain.device, chain.examples, chain.delivered) == (None, 0, [])
