"""Grouped selection over a wire: one device a round of each group of like data (FLDG-L, arXiv 2201.12515)."""

import numpy as np
import pytest
from fleets import Fleet
from quadrants import quadrants
from waiting import until

from edge_sdk import ArrayDataset, RunError, Sharing
from edge_sdk.features import open_describer
from edge_sdk.protocol.messages import Offer, Task
from edge_server.store import Store

HASHED = Sharing(descriptor=True)


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def bright(seed):
    return ArrayDataset(255 - quadrants(12, seed).images // 4, quadrants(12, seed).labels)


def dark(seed):
    return ArrayDataset(quadrants(12, seed).images // 4, quadrants(12, seed).labels)


def rows(fleet):
    store = Store(fleet.folder / "server", exclusive=False)
    return store.rounds(store.runs()[-1].id)


def start(fleet, sharing=HASHED):
    for number in range(3):
        fleet.device(f"bright-{number}", bright(number), sharing=sharing)
        fleet.device(f"dark-{number}", dark(number + 3), sharing=sharing)


def test_every_round_takes_one_device_of_each_group(fleet, describing):
    _, server = fleet.serve(describing, rounds=6, participants=2, min_devices=6, selection="grouped")
    start(fleet)
    server.result()
    kinds = [sorted(device.split("-")[0] for device in row.selected) for row in rows(fleet)]
    assert kinds == [["bright", "dark"]] * 6
    assert len({device for row in rows(fleet) for device in row.selected}) > 2


def test_grouping_by_the_feature_itself_is_a_choice_of_its_own(fleet, describing):
    settings = {"selection": "grouped", "descriptor": "feature"}
    _, server = fleet.serve(describing, rounds=3, participants=2, min_devices=6, **settings)
    start(fleet, Sharing(feature=True))
    server.result()
    assert {task.wants for _, task in fleet.heard(Task) if task.kind == "describe"} == {("feature",)}
    kinds = [sorted(device.split("-")[0] for device in row.selected) for row in rows(fleet)]
    assert kinds == [["bright", "dark"]] * 3


def test_the_hash_that_leaves_is_that_of_the_devices_own_images(fleet, describing):
    server, thread = fleet.serve(describing, rounds=50, participants=1, selection="grouped")
    fleet.device("a", dark(0), sharing=HASHED)
    until(lambda: [o for _, o in fleet.heard(Offer) if o.kind == "train"])
    server.stop()
    thread.result()
    store = Store(fleet.folder / "server", exclusive=False)
    run = store.runs()[-1]
    from edge_sdk.description import check_description
    from edge_server.rows import WorkKey

    (result,) = store.results(WorkKey(run.id, 0, 0, "describe"))
    told = check_description(store.blob(result.hash), ("descriptor",), describing.manifest, max_examples=100)
    expected = open_describer(describing, threads=1).descriptor(dark(0), np.arange(12))
    np.testing.assert_array_equal(told["descriptor"], expected)


def test_what_was_told_of_the_data_is_forgotten_when_the_run_has_ended(fleet, describing):
    _, server = fleet.serve(describing, participants=1, selection="grouped")
    fleet.device("a", dark(0), sharing=HASHED)
    server.result()
    store = Store(fleet.folder / "server", exclusive=False)
    from edge_server.rows import WorkKey

    told = [o.blob.hash for _, o in fleet.heard(Offer) if o.kind == "describe"]
    assert store.results(WorkKey(store.runs()[-1].id, 0, 0, "describe")) == []
    with pytest.raises(RunError, match="has lost blob"):
        store.blob(told[0])


def test_devices_that_share_no_descriptor_are_a_group_of_their_own(fleet, describing):
    _, server = fleet.serve(describing, rounds=4, participants=2, min_devices=4, selection="grouped")
    for number in range(2):
        fleet.device(f"told-{number}", dark(number), sharing=HASHED)
        fleet.device(f"untold-{number}", dark(number + 2))
    server.result()
    for row in rows(fleet):
        assert {device.split("-")[0] for device in row.selected} >= {"untold"} or len(row.selected) == 2
        assert len(row.selected) == 2


def test_a_bundle_that_cannot_describe_data_is_refused_at_the_start(fleet, norm):
    with pytest.raises(RunError, match="export it with --describe"):
        fleet.serve(norm, selection="grouped")
