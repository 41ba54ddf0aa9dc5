"""Who is there: connections, installs, leases, silence."""

from edge_sdk.protocol.messages import Join
from edge_server.registry import FORGOTTEN, HEARTBEAT, KEPT_BOOTS, MISSED, RESERVED, Registry

SILENCE = HEARTBEAT * MISSED


def join(install="a", boot="1", nonce="1", examples=10, lease=None):
    return Join(
        sdk="0", install=install * 32, boot=boot * 16, nonce=nonce * 16, examples=examples, lease=lease
    )


def registry(**arguments):
    made = Registry()
    assert made.join("d", join(**arguments), 0.0) is None
    return made


def test_a_device_that_joins_is_present():
    assert registry().present(0.0) == ["d"]


def test_an_id_in_use_by_another_install_is_refused_and_the_first_goes_on():
    made = registry()
    assert "in use" in made.join("d", join(install="b", boot="2", nonce="2"), 1.0)
    assert made.get("d").nonce == "1" * 16


def test_the_same_install_may_connect_anew():
    made = registry()
    assert made.join("d", join(nonce="2"), 1.0) is None


def test_the_same_install_may_start_anew():
    made = registry()
    assert made.join("d", join(boot="2", nonce="2"), 1.0) is None
    assert made.join("d", join(boot="3", nonce="3"), 2.0) is None


def test_of_two_copies_of_a_work_folder_the_first_goes_on():
    made = registry()
    assert made.join("d", join(boot="2", nonce="2"), 1.0) is None
    assert made.join("d", join(boot="1", nonce="3"), 2.0) is None
    assert "copy" in made.join("d", join(boot="2", nonce="4"), 3.0)
    assert made.get("d").nonce == "3" * 16


def test_a_copy_stays_refused_however_often_the_first_connects_anew():
    made = registry()
    for now, (boot, nonce) in enumerate([("2", "2"), ("1", "3"), ("1", "4"), ("1", "5")]):
        assert made.join("d", join(boot=boot, nonce=nonce), float(now)) is None
    assert "copy" in made.join("d", join(boot="2", nonce="6"), 9.0)


def test_only_the_last_copies_are_remembered():
    made = registry()
    for number in range(100):
        assert made.join("d", join(boot=f"{number:02}"), 1.0) is None
        assert made.join("d", join(boot="1"), 1.0) is None
    assert made.get("d").copies == [f"{number:02}" * 16 for number in range(100 - KEPT_BOOTS, 100)]


def test_the_copies_of_a_device_are_forgotten_with_it():
    made = registry()
    made.join("d", join(boot="2"), 1.0)
    made.join("d", join(boot="1"), 1.0)
    made.leave("d", "1" * 16, 1.0)
    made.expire(FORGOTTEN + 2)
    for nonce in "45":
        assert made.join("d", join(boot="2", nonce=nonce), FORGOTTEN + 2) is None


def test_the_will_of_an_old_connection_does_not_end_the_new_one():
    made = registry()
    made.join("d", join(nonce="2"), 1.0)
    assert not made.leave("d", "1" * 16, 0.0)
    assert made.is_present("d")


def test_a_device_that_has_left_gives_its_id_free_after_a_while():
    made = registry()
    assert made.leave("d", "1" * 16, 0.0)
    assert "was just now" in made.join("d", join(install="b", nonce="2"), RESERVED - 1)
    assert made.join("d", join(install="b", nonce="2"), RESERVED + 1) is None


def test_a_device_that_has_been_gone_for_long_is_forgotten():
    made = registry()
    made.leave("d", "1" * 16, 0.0)
    made.expire(FORGOTTEN)
    assert made.get("d") is not None
    made.expire(FORGOTTEN + 1)
    assert made.get("d") is None


def test_a_goodbye_counts_once():
    made = registry()
    made.leave("d", "1" * 16, 0.0)
    assert not made.leave("d", "1" * 16, 0.0)


def test_a_silent_device_is_gone_after_three_heartbeats():
    made = registry()
    assert made.expire(float(SILENCE)) == []
    assert made.expire(SILENCE + 1.0) == ["d"]
    assert made.expire(SILENCE + 2.0) == []
    assert made.present(SILENCE + 2.0) == []


def test_a_heartbeat_keeps_a_device_and_tells_the_size_of_its_data():
    made = registry()
    assert made.here("d", "1" * 16, 25, float(SILENCE))
    assert made.expire(SILENCE + 1.0) == []
    assert made.get("d").examples == 25


def test_a_heartbeat_brings_back_a_device_that_was_silent():
    made = registry()
    made.expire(SILENCE + 1.0)
    assert made.here("d", "1" * 16, 10, SILENCE + 2.0)
    assert made.is_present("d")


def test_a_heartbeat_of_an_unknown_connection_is_told_apart():
    made = registry()
    assert not made.here("d", "2" * 16, 10, 1.0)
    assert not made.here("stranger", "1" * 16, 10, 1.0)


def test_a_lease_that_has_run_out_is_not_selected():
    made = registry(lease=30)
    assert made.present(29.0) == ["d"]
    assert made.present(30.0) == []


def test_a_device_under_lease_may_hand_in_after_it_has_left():
    made = registry(lease=30)
    made.leave("d", "1" * 16, 0.0)
    assert made.holds_lease("d", 29.0)
    assert not made.holds_lease("d", 31.0)


def test_a_device_without_data_is_not_selected():
    assert registry(examples=0).present(0.0) == []


def test_the_order_of_joins_does_not_show():
    orders = []
    for names in ("abc", "cab"):
        made = Registry()
        for name in names:
            made.join(name, join(), 0.0)
        orders.append(made.present(0.0))
    assert orders[0] == orders[1]
