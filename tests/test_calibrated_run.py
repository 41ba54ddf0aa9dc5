"""Calibration over a wire: statistics of the last model's features make a new classifier (CCVR)."""

import numpy as np
import pytest
from fleets import FakeDevice, Fleet
from quadrants import quadrants
from waiting import until

from edge_sdk import Sharing
from edge_sdk.protocol.messages import Declined, Offer, Task, key_of
from edge_sdk.runtime import open_runtime
from edge_sdk.statistics import class_statistics
from edge_sdk.tensors import decode, encode
from edge_server.calibration import Settings, calibrate
from edge_server.replay import replay
from edge_server.store import Store

SHARING = Sharing(statistics=True, withhold_below=0)
NAMES = "abc"


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def data_of(name):
    return quadrants(30, seed=ord(name))


def calibrated_run(fleet, bundle, sharing=SHARING, **settings):
    options = {"rounds": 2, "participants": 3, "calibration": "ccvr", **settings}
    server, thread = fleet.serve(bundle, **options)
    for name in NAMES:
        fleet.device(name, data_of(name), sharing=sharing)
    return server, thread


def rows(fleet):
    store = Store(fleet.folder / "server", exclusive=False)
    return store, store.rounds(store.runs()[-1].id)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_new_classifier_is_that_of_the_devices_own_statistics(fleet, norm, covariance):
    _, server = calibrated_run(fleet, norm, covariance=covariance, virtual_features=200)
    calibrated = server.result().bundle.weights
    store, (*_, row) = rows(fleet)
    assert (row.kind, row.status) == ("statistics", "aggregated")
    trained = decode(store.blob(row.model_after), norm.manifest.specs)
    assert_equal(calibrated, trained)

    runtime = open_runtime(norm, threads=1)
    last = last_trained(fleet, norm)
    runtime.set_weights(last)
    reports = [
        class_statistics(runtime, norm.manifest, data_of(name), np.arange(30), covariance=covariance)
        for name in NAMES
    ]
    settings = Settings(per_class=200)
    expected = calibrate(last, norm.manifest, reports, covariance=covariance, settings=settings)
    assert_equal(calibrated, expected)
    for name in calibrated:
        changed = not np.array_equal(calibrated[name], last[name])
        assert changed == (name in norm.manifest.head)


def last_trained(fleet, norm):
    """The model before calibration, which every device was sent."""
    refs = [task.model for _, task in fleet.heard(Task) if task.kind == "statistics"]
    data = (fleet.folder / "devices" / "a" / "blobs" / refs[0].hash).read_bytes()
    return decode(data, norm.manifest.specs)


def test_a_calibrated_run_has_a_last_line_of_its_own_and_its_replay_has_the_same_bits(fleet, norm):
    lines = []
    options = {"evaluation": "server", "eval_data": quadrants(200, seed=1)}
    _, server = calibrated_run(fleet, norm, on_round=lines.append, **options)
    outcome = server.result()
    assert [(line.round, line.calibrated) for line in lines] == [(1, False), (2, False), (2, True)]
    assert outcome.rounds == tuple(lines)
    assert lines[-1].accuracy == outcome.evaluation.accuracy
    assert lines[-1].bytes_up == sum(o.blob.size for _, o in fleet.heard(Offer) if o.kind == "statistics")
    store, _ = rows(fleet)
    assert [r.same for r in replay(store, store.runs()[-1])] == [True, True, True]


def test_without_statistics_the_last_model_stands(fleet, norm):
    _, server = calibrated_run(fleet, norm, sharing=Sharing())
    outcome = server.result()
    assert outcome.finished
    assert any("not calibrated" in sentence for sentence in fleet.status)
    assert any("does not share its statistics" in sentence for sentence in fleet.status)
    assert len(outcome.rounds) == 2


def test_a_server_that_starts_anew_keeps_the_statistics_that_are_in(fleet, norm):
    options = {"participants": 1, "min_devices": 2, "rounds": 1, "calibration": "ccvr", "deadline": 20.0}
    server, thread = fleet.serve(norm, **options)
    slow = FakeDevice(fleet.broker, "slow")
    slow.join()
    fleet.device("a", data_of("a"), sharing=SHARING)

    def decline_training(device):
        task = device.task()
        if task.kind == "train":
            device.send(Declined(**key_of(task), reason="battery"))
            task = device.task()
        return task

    task = decline_training(slow) if slow_is_asked(fleet) else slow.task()
    assert task.kind == "statistics"
    until(lambda: fleet.heard(Offer, "a")[-1:] and fleet.heard(Offer, "a")[-1][1].kind == "statistics")
    until(lambda: stored_statistics(fleet) == 1)
    server.stop()
    thread.result()
    heard = len(fleet.heard(Offer, "a"))
    _, again = fleet.serve(norm, **options)
    slow.join()
    slow.send(Declined(**key_of(slow.task()), reason="nothing is shared"))
    slow.end()
    outcome = again.result()
    assert outcome.rounds[-1].calibrated
    assert len(fleet.heard(Offer, "a")) == heard  # nothing is asked of it twice


def slow_is_asked(fleet):
    until(lambda: fleet.heard(Task))
    return fleet.heard(Task)[0][0] == "slow"


def stored_statistics(fleet):
    store, (*_, row) = rows(fleet)
    return len(store.results(row)) if row.kind == "statistics" else 0


def test_statistics_that_cannot_be_true_are_refused(fleet, norm):
    _, server = fleet.serve(norm, participants=1, calibration="ccvr", covariance="diagonal")
    liar = FakeDevice(fleet.broker, "liar")
    liar.join()
    task = liar.task()
    liar.take(task)
    nothing = {name: np.zeros_like(tensor) for name, tensor in norm.weights.items()}
    assert liar.hand_in(task, encode(nothing)).accepted
    task = liar.task()
    lies = {
        "count": np.full(4, -1, np.int64),
        "mean": np.zeros((4, 36)),
        "scatter": np.zeros((4, 36)),
    }
    receipt = liar.hand_in(task, encode(lies))
    assert not receipt.accepted
    liar.end()
    server.result()
