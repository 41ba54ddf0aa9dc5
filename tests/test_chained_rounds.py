"""Mediators over a wire: devices behind one train one after the other (Astraea, arXiv 1907.01132)."""

import time

import numpy as np
import pytest
from fleets import FakeDevice, Fleet
from quadrants import quadrants
from waiting import until

from edge_sdk import ArrayDataset
from edge_sdk.description import Sharing
from edge_sdk.protocol.messages import Cancel, Declined, Offer, Taken, Task, key_of
from edge_sdk.tensors import encode
from edge_server.replay import replay
from edge_server.rows import WorkKey
from edge_server.store import Store

SHARING = Sharing(histogram=True, withhold_below=0)


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def of_class(label, count=12):
    data = quadrants(400, seed=label)
    return data.take(np.flatnonzero(data.labels == label)[:count])


def joined(*parts):
    return ArrayDataset(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


def replayed(fleet):
    store = Store(fleet.folder / "server", exclusive=False)
    return [r.same for r in replay(store, store.runs()[-1])]


def row_of(fleet, number=1):
    store = Store(fleet.folder / "server", exclusive=False)
    return store.rounds(store.runs()[-1].id, number=number)[-1]


def start_four(fleet, folder=""):
    """Devices a, b, c, d of one class each; returns their threads."""
    return [
        fleet.device(name, of_class(label), sharing=SHARING, work_dir=name + folder)
        for label, name in enumerate("abcd")
    ]


def trained_alone(bundle, data, task, weights):
    """What a device makes of ``weights`` under ``task``, without any fleet."""
    from edge_sdk.runtime import open_runtime
    from edge_sdk.training import train
    from edge_sdk.work import settings_of

    runtime = open_runtime(bundle, threads=1)
    runtime.set_weights(weights)
    train(runtime, bundle.manifest, data, np.arange(len(data)), settings_of(task))
    return runtime.get_weights()


def test_devices_of_one_class_are_chained_into_mediators_of_many(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=4, chain=2, rounds=2, on_round=results.append)
    start_four(fleet)
    server.result()
    assert [len(chain) for chain in row_of(fleet).chains] == [2, 2]
    assert [(r.chains, r.participants, r.examples) for r in results] == [(2, 4, 48)] * 2
    assert results[0].divergence == pytest.approx(np.log(2))  # two of four classes each, evenly
    assert replayed(fleet) == [True, True]


def test_each_device_trains_from_what_the_one_before_it_made(fleet, norm):
    _, server = fleet.serve(norm, participants=4, chain=4)
    start_four(fleet)
    after = server.result().bundle.weights
    (chain,) = row_of(fleet).chains
    tasks = {device: task for device, task in fleet.heard(Task) if task.kind == "train"}
    weights = norm.weights
    for device in chain:
        weights = trained_alone(norm, of_class("abcd".index(device)), tasks[device], weights)
    for name, expected in weights.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert [tasks[device].hop for device in chain] == [0, 1, 2, 3]


def test_a_mediator_goes_through_its_devices_as_often_as_it_is_told(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, chain_passes=3, on_round=results.append)
    for label, name in enumerate("ab"):
        fleet.device(name, of_class(label), sharing=SHARING)
    server.result()
    (chain,) = row_of(fleet).chains
    turns = [(device, offer.hop) for device, offer in fleet.heard(Offer) if offer.kind == "train"]
    assert list(dict.fromkeys(turns)) == [(chain[hop % 2], hop) for hop in range(6)]
    assert results[0].examples == 24  # each device once, in however many passes
    assert results[0].bytes_down == 6 * len(encode(norm.weights))
    assert replayed(fleet) == [True]


def test_a_device_that_fails_is_skipped_and_the_chain_goes_on_from_the_last_good_weights(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=3, chain=3, on_round=results.append)
    bad = FakeDevice(fleet.broker, "bad")
    bad.join()
    fleet.device("a", of_class(0), sharing=SHARING)
    fleet.device("b", of_class(1), sharing=SHARING)
    for _ in range(2):  # it neither describes its data nor trains
        task = bad.task()
        bad.send(Declined(**key_of(task), reason="battery"))
    bad.end()
    server.result()
    assert (results[0].participants, results[0].examples) == (2, 24)
    assert replayed(fleet) == [True]


def test_a_device_that_has_its_turn_for_too_long_is_skipped(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, deadline=3.0, on_round=results.append)
    slow = FakeDevice(fleet.broker, "slow")
    slow.join()
    fleet.device("a", of_class(0), sharing=SHARING)
    slow.send(Declined(**key_of(slow.task()), reason="nothing is shared"))
    task = slow.task()
    slow.take(task)
    assert "turn" in slow.wait_for(Cancel).reason
    slow.end()
    server.result()
    assert results[0].participants == 1


def test_a_device_that_goes_in_its_turn_is_skipped_after_the_grace(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, grace=0.5, on_round=results.append)
    gone = FakeDevice(fleet.broker, "gone")
    gone.join()
    fleet.device("a", of_class(0), sharing=SHARING)
    gone.send(Declined(**key_of(gone.task()), reason="nothing is shared"))
    gone.take(gone.task())
    gone.leave()
    server.result()
    assert results[0].participants == 1
    assert any("gone is skipped" in sentence for sentence in fleet.status)


def test_a_device_whose_turn_comes_while_it_is_away_is_skipped_after_the_grace(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, grace=0.5, on_round=results.append)
    devices = [FakeDevice(fleet.broker, name) for name in ("a", "b")]
    for device in devices:
        device.join()
    for device in devices:
        device.send(Declined(**key_of(device.task()), reason="nothing is shared"))
    first = devices[0].task()
    devices[0].take(first)
    devices[1].leave()
    nothing = encode({name: np.zeros_like(tensor) for name, tensor in norm.weights.items()})
    assert devices[0].hand_in(first, nothing).accepted
    devices[0].end()
    server.result()
    assert results[0].participants == 1


def test_a_server_that_starts_anew_goes_on_in_the_middle_of_a_chain_with_the_same_bits(fleet, norm):
    settings = {"participants": 4, "chain": 4, "rounds": 2}
    _, server = fleet.serve(norm, **settings)
    first = start_four(fleet)
    undisturbed = server.result().bundle.weights
    for thread in first:
        thread.result()

    other, running = fleet.serve(norm, work_dir="other", **settings)
    start_four(fleet, "-again")
    heard = len(fleet.heard(Offer))
    until(lambda: any(o.kind == "train" and o.hop == 1 for _, o in fleet.heard(Offer)[heard:]))
    other.stop()
    running.result()
    _, again = fleet.serve(norm, work_dir="other", **settings)
    weights = again.result().bundle.weights
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


def test_rare_classes_are_augmented_and_counted_after_it(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, augmentation=1.0, on_round=results.append)
    few, many = of_class(0, count=4), joined(of_class(1, 20), of_class(2, 20), of_class(3, 20))
    fleet.device("few", few, sharing=SHARING)
    fleet.device("many", many, sharing=SHARING)
    server.result()
    # Class 0 has 4 of a mean of 16, so that each example gets three copies.
    taken = {device: t.examples for device, t in fleet.heard(Taken) if t.kind == "train"}
    assert taken == {"few": 16, "many": 60}
    assert results[0].divergence == pytest.approx(
        np.log(4) + sum(p * np.log(p) for p in np.array([16, 20, 20, 20]) / 76)
    )


def test_a_run_that_wants_to_know_more_than_is_shared_goes_on_without(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, augmentation=1.0, on_round=results.append)
    fleet.device("a", of_class(0))
    fleet.device("b", of_class(1))
    server.result()
    assert (results[0].participants, results[0].divergence) == (2, None)
    assert any("does not share its histogram" in sentence for sentence in fleet.status)
    assert not [o for _, o in fleet.heard(Offer) if o.kind == "describe"]


def test_counts_below_the_devices_own_bound_are_withheld(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=1, chain=1, on_round=results.append)
    data = joined(of_class(0, 4), of_class(1, 9))
    fleet.device("a", data, sharing=Sharing(histogram=True, withhold_below=5))
    server.result()
    assert results[0].divergence == pytest.approx(np.log(4))  # as if it had one class


def test_a_device_that_comes_later_is_asked_before_the_next_round(fleet, norm):
    _, server = fleet.serve(norm, participants=2, min_devices=1, chain=2, rounds=6)
    fleet.device("a", of_class(0), sharing=SHARING)
    until(lambda: [o for d, o in fleet.heard(Offer, "a") if o.kind == "train"])
    fleet.device("b", of_class(1), sharing=SHARING)
    server.result()
    kinds = [offer.kind for _, offer in fleet.heard(Offer, "b")]
    assert kinds[0] == "describe"
    assert set(kinds[1:]) == {"train"}


def test_a_device_that_declines_to_describe_its_augmented_data_is_not_asked_for_ever(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=2, chain=2, augmentation=1.0, on_round=results.append)
    allowed = iter([True, False])
    fleet.device("few", of_class(0, 4), sharing=SHARING, may_train=lambda: next(allowed, True))
    fleet.device("many", joined(of_class(1, 20), of_class(2, 20), of_class(3, 20)), sharing=SHARING)
    server.result()
    asked = {(device, task.round) for device, task in fleet.heard(Task) if task.kind == "describe"}
    assert asked == {("few", 0), ("many", 0), ("few", 1), ("many", 1)}
    assert results[0].participants == 2


def test_a_server_that_starts_anew_between_two_descriptions_makes_its_plan(fleet, norm):
    options = {"participants": 2, "chain": 2, "augmentation": 1.0, "rounds": 1}
    server, thread = fleet.serve(norm, **options)
    many = joined(of_class(1, 20), of_class(2, 20), of_class(3, 20))
    fleet.device("few", of_class(0, 4), sharing=SHARING)
    quiet = FakeDevice(fleet.broker, "quiet")
    quiet.join()
    quiet.task()  # which it never takes, so that the descriptions stay open
    until(lambda: [o for _, o in fleet.heard(Offer, "few") if o.kind == "describe"])
    until(lambda: stored_descriptions(fleet))
    server.stop()
    thread.result()
    quiet.leave()
    _, again = fleet.serve(norm, **options)
    fleet.device("many", many, sharing=SHARING)
    again.result()
    taken = {device: t.examples for device, t in fleet.heard(Taken) if t.kind == "train"}
    assert taken == {"few": 16, "many": 60}
    first = [o for _, o in fleet.heard(Offer, "few") if (o.kind, o.round) == ("describe", 0)]
    assert len({o.blob.hash for o in first}) == 1


def stored_descriptions(fleet):
    store = Store(fleet.folder / "server", exclusive=False)
    return store.results(WorkKey(store.runs()[-1].id, 0, 0, "describe"))


def test_two_turns_that_make_the_same_update_both_count(fleet, norm):
    results = []
    _, server = fleet.serve(norm, participants=1, chain=1, chain_passes=2, on_round=results.append)
    device = FakeDevice(fleet.broker, "a")
    device.join()
    device.send(Declined(**key_of(device.task()), reason="nothing is shared"))
    same = {name: np.full_like(tensor, 1) for name, tensor in norm.weights.items()}
    same["norm.num_batches_tracked"] = np.array(-1)
    for hop in range(2):
        task = device.wait_for(Task, where=lambda task, hop=hop: task.hop == hop)
        device.take(task)
        assert device.hand_in(task, encode(same)).accepted
    device.end()
    weights = server.result().bundle.weights
    np.testing.assert_allclose(norm.weights["head.weight"] - weights["head.weight"], 2.0, rtol=1e-5)
    assert weights["norm.num_batches_tracked"] == 2


def comes_and_goes(fleet, device, fact):
    """Let a device leave and join again until ``fact`` holds; returns the seconds that it took."""
    began = time.monotonic()
    while not fact():
        assert time.monotonic() - began < 30
        time.sleep(0.4)
        device.leave()
        device.join()
    return time.monotonic() - began


def asked_to_train(fleet):
    return [task for _, task in fleet.heard(Task) if task.kind == "train"]


def test_a_device_that_comes_and_goes_does_not_put_a_round_off_for_ever(fleet, norm):
    server, thread = fleet.serve(norm, participants=1, min_devices=2, chain=1, deadline=2.0)
    restless = FakeDevice(fleet.broker, "restless")
    restless.join()
    fleet.device("a", of_class(0), sharing=SHARING)
    comes_and_goes(fleet, restless, lambda: asked_to_train(fleet))
    restless.leave()
    server.stop()
    thread.result()


def test_coming_back_does_not_begin_a_turn_anew(fleet, norm):
    server, thread = fleet.serve(norm, participants=2, chain=2, deadline=3.0, rounds=9)
    slow = FakeDevice(fleet.broker, "aslow")
    slow.join()
    fleet.device("b", of_class(0), sharing=SHARING)
    slow.send(Declined(**key_of(slow.task()), reason="nothing is shared"))
    slow.take(slow.task())
    skipped = comes_and_goes(
        fleet, slow, lambda: any("aslow is skipped" in sentence for sentence in fleet.status)
    )
    assert skipped < 2 * 3.0
    slow.leave()
    server.stop()
    thread.result()
