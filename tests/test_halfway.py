"""Training that a crash has cut off goes on after the last epoch that was kept, and gives the same update."""

import numpy as np
import pytest
import torch
from quadrants import quadrants
from test_work import Wire, task_of
from torch import nn

from edge_export import export_bundle
from edge_sdk import Engine, halfway
from edge_sdk.work import Worker
from edge_sdk.workspace import Workspace

OPTIONS = {"epochs": 4, "momentum": "0.9", "proximal": "0.5"}
STEPS = 4 * 3
"""Four epochs of 20 examples in batches of 8."""


class PowerCut(BaseException):
    """The end of a process, for what is called in it."""


@pytest.fixture(scope="module")
def bundle():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 4))
    return export_bundle(model, (1, 8, 8), name="long", options=("momentum", "proximal"))


@pytest.fixture(autouse=True)
def every_epoch(monkeypatch):
    monkeypatch.setattr(halfway, "KEEP_EVERY", 0.0)


def perform(folder, bundle, task, *, cut_at=0, source=None):
    """The update of ``task`` and the steps that were done for it; None if the power goes at a step."""
    wire, steps = Wire(bundle), []

    def on_progress(progress):
        steps.append(progress.step)
        if progress.step == cut_at:
            raise PowerCut

    space = Workspace(folder)
    try:
        worker = Worker(
            workspace=space,
            engine=Engine(threads=1),
            source=source or quadrants(20),
            held_out=0.0,
            on_progress=on_progress,
        )
        worker.perform(task, wire, wire, lambda: False)
    except PowerCut:
        return None, steps
    finally:
        space.close()
    return wire.delivered[-1], steps


@pytest.fixture
def whole(tmp_path, bundle):
    return perform(tmp_path / "whole", bundle, task_of(bundle, 1, **OPTIONS))[0]


def test_it_goes_on_after_the_last_epoch_and_gives_the_same_update(tmp_path, bundle, whole):
    task = task_of(bundle, 1, **OPTIONS)
    assert perform(tmp_path, bundle, task, cut_at=8) == (None, [1, 2, 3, 4, 5, 6, 7, 8])
    assert perform(tmp_path, bundle, task, cut_at=11) == (None, [7, 8, 9, 10, 11])
    assert perform(tmp_path, bundle, task) == (whole, [10, 11, 12])
    assert Workspace(tmp_path).halfway is None


def test_another_attempt_at_the_round_goes_on_from_there_too(tmp_path, bundle, whole):
    perform(tmp_path, bundle, task_of(bundle, 1, **OPTIONS), cut_at=8)
    update, steps = perform(tmp_path, bundle, task_of(bundle, 1, attempt=1, **OPTIONS))
    assert (update, steps[0]) == (whole, 7)


@pytest.mark.parametrize("changed", [{"lr": "0.2"}, {"round_number": 2}, {"source": quadrants(19)}])
def test_other_training_begins_at_its_beginning(tmp_path, bundle, changed):
    perform(tmp_path, bundle, task_of(bundle, 1, **OPTIONS), cut_at=8)
    fields = {"round_number": 1, **OPTIONS, **changed}
    source = fields.pop("source", None)
    _, steps = perform(tmp_path, bundle, task_of(bundle, **fields), source=source)
    assert len(steps) == STEPS


def test_what_the_disk_has_lost_is_trained_again(tmp_path, bundle, whole):
    task = task_of(bundle, 1, **OPTIONS)
    perform(tmp_path, bundle, task, cut_at=8)
    space = Workspace(tmp_path)
    (space.path / "blobs" / space.halfway.weights).write_bytes(b"other bytes")
    space.close()
    update, steps = perform(tmp_path, bundle, task)
    assert (update, len(steps)) == (whole, STEPS)


def test_flash_memory_is_spared(tmp_path, bundle, monkeypatch):
    monkeypatch.setattr(halfway, "KEEP_EVERY", 3600.0)
    perform(tmp_path, bundle, task_of(bundle, 1, **OPTIONS), cut_at=8)
    assert Workspace(tmp_path).halfway is None


def test_no_stream_of_numbers_is_another_ones(bundle):
    """A seed sequence is padded with zeros: [7, 1, 0] is [7, 1]."""
    streams = [[7, epoch, *more] for epoch in range(3) for more in ([], [1], [2])]
    assert len({np.random.default_rng(seed).integers(1 << 62) for seed in streams}) == 9
