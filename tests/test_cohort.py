"""Who is asked, who counts, who replaces whom."""

from hypothesis import given
from hypothesis import strategies as st

from edge_server.cohort import Cohort, Standing


def cohort(wanted=2, asked=2, order="abcd"):
    made = Cohort(wanted=wanted, asked=asked, order=order)
    made.call()
    return made


def test_the_first_in_order_are_asked():
    assert cohort().pending == ["a", "b"]


def test_over_selection_asks_more_than_it_waits_for():
    over = cohort(wanted=2, asked=3)
    over.accept("c")
    over.accept("a")
    assert over.pending == ["b"]
    assert over.complete


def test_a_device_that_declines_is_replaced_by_the_next():
    asked = cohort()
    assert asked.drop("a")
    assert asked.call() == ["c"]


def test_a_device_that_was_dropped_does_not_come_back():
    asked = cohort()
    asked.drop("a")
    asked.volunteer("a")
    asked.take("a")
    assert asked.standing("a") == Standing.DROPPED
    assert "a" not in asked.call() + asked.call()


def test_a_lost_device_may_come_back_to_its_task():
    asked = cohort(order="ab")
    asked.lose("a")
    asked.take("a")
    assert asked.standing("a") == Standing.TAKEN


def test_a_lost_device_that_comes_back_and_delivers_at_once_is_not_asked_again():
    asked = cohort(order="ab")
    asked.lose("a")
    asked.volunteer("a")
    asked.take("a")
    asked.accept("a")
    asked.lose("b")
    assert asked.call() == []
    assert asked.accepted == ["a"]


def test_a_lost_device_that_comes_back_and_declines_is_not_asked_again():
    asked = cohort(order="ab")
    asked.lose("a")
    asked.volunteer("a")
    asked.take("a")
    asked.drop("a")
    assert asked.call() == []


def test_a_result_that_is_in_stays_in():
    asked = cohort()
    asked.accept("a")
    assert not asked.lose("a")
    assert not asked.drop("a")
    assert asked.accepted == ["a"]


def test_nobody_is_asked_for_a_place_that_is_filled():
    asked = cohort()
    asked.accept("a")
    assert asked.call() == []


def test_a_device_that_came_late_replaces_one_that_failed():
    asked = cohort(order="ab")
    asked.volunteer("late")
    assert asked.call() == []
    asked.drop("b")
    assert asked.call() == ["late"]


def test_a_device_that_has_gone_replaces_nobody():
    asked = cohort(order="abc")
    asked.withdraw("c")
    asked.drop("a")
    assert asked.call() == []


def test_a_cohort_without_anyone_to_ask_is_exhausted():
    asked = cohort(order="ab")
    asked.drop("a")
    assert not asked.exhausted
    asked.lose("b")
    assert asked.exhausted
    assert asked.lost == ["b"]


def test_after_a_restart_the_devices_of_the_round_come_before_others():
    restored = Cohort.restored(wanted=2, asked=2, selected=["a", "b"])
    for device in ("other", "b", "a"):
        restored.volunteer(device)
    assert sorted(restored.call()) == ["a", "b"]


def test_while_the_devices_of_the_round_may_come_back_no_other_is_asked():
    restored = Cohort.restored(wanted=2, asked=2, selected=["a", "b"])
    for device in ("other", "b"):
        restored.volunteer(device)
    assert restored.call(returning=True) == ["b"]
    assert restored.call() == ["other"]


steps = st.tuples(
    st.sampled_from(["call", "take", "accept", "lose", "drop", "volunteer"]), st.sampled_from("abcdef")
)


@given(st.integers(1, 3), st.integers(0, 2), st.lists(steps))
def test_a_call_fills_the_free_places_and_asks_nobody_twice_at_a_time(wanted, more, done):
    made = Cohort(wanted=wanted, asked=wanted + more, order="abcdef")
    for action, device in done:
        before = [*made.pending, *made.accepted]
        if action == "call":
            called = made.call()
            assert len(called) <= max(wanted + more - len(before), 0)
            assert not set(called) & set(before)
        elif action != "accept" or device in made.pending:
            getattr(made, action)(device)
        standings = [*made.pending, *made.accepted, *made.lost]
        assert len(standings) == len(set(standings))
