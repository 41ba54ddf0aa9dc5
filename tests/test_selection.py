"""Random selection: of everybody, evenly, from the numbers given alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.selection import device_seed, random_order

IDS = [f"d{number:02}" for number in range(20)]


def order(devices=IDS, seed=0, round_number=1, attempt=0):
    return random_order(devices, seed=seed, round_number=round_number, attempt=attempt)


@given(st.permutations(IDS))
def test_the_order_depends_on_the_set_of_ids_alone(shuffled):
    assert order(shuffled) == order()


def test_everybody_is_in_the_order_once():
    assert sorted(order()) == IDS


@pytest.mark.parametrize("change", [{"seed": 1}, {"round_number": 2}, {"attempt": 1}])
def test_each_number_changes_the_order(change):
    assert order(**change) != order()


def test_every_device_comes_first_about_equally_often():
    firsts = [order(round_number=number)[0] for number in range(4000)]
    # 200 expected each; six standard deviations of the binomial are 83.
    assert all(117 <= firsts.count(device) <= 283 for device in IDS)


def test_a_devices_seed_is_the_same_in_every_attempt_and_fits_a_message():
    seeds = {device_seed(1, number, device) for number in range(50) for device in IDS}
    assert len(seeds) == 50 * len(IDS)
    assert max(seeds) < 1 << 53
    assert device_seed(1, 2, "d") == device_seed(1, 2, "d")
