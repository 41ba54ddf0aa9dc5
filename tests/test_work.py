"""One task on a device, without a wire: what an update begins with, and what is declined before it costs."""

import sys

import numpy as np
import pytest
import torch
from quadrants import quadrants
from torch import nn

from edge_export import export_bundle
from edge_sdk import Bundle, Engine
from edge_sdk.errors import BrokerError, ProtocolError, TensorError
from edge_sdk.examples import Cancelled
from edge_sdk.protocol import reference
from edge_sdk.protocol.messages import Offer, Receipt, Task, key_of
from edge_sdk.tensors import encode
from edge_sdk.training import evaluate
from edge_sdk.work import Worker
from edge_sdk.workspace import Workspace

RUN = "a" * 32
BOUNDS = {"mean": 6, "statistic": 16, "counter": 40}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    return export_bundle(model, (1, 8, 8), name="momentum", options=("momentum",))


class Wire:
    """Link and exchange in one: the server has every blob, and does with an update what a test says."""

    def __init__(self, bundle):
        self._blobs = {ref.hash: data for data in blobs_of(bundle) for ref in (reference(data),)}
        self.sent, self.delivered, self.accepts = [], [], True

    def send(self, message):
        self.sent.append(message)

    def fetch(self, ref, **_):
        return self._blobs[ref.hash]

    def deliver(self, result, data, **_):
        self.delivered.append(data)
        if self.accepts is None:
            raise BrokerError("the server has not answered")
        return Receipt(**key_of(result), accepted=self.accepts)


def blobs_of(bundle):
    return bundle.data, encode(bundle.weights)


@pytest.fixture
def wire(bundle):
    return Wire(bundle)


@pytest.fixture
def steps():
    return []


@pytest.fixture
def worker(tmp_path, steps):
    space = Workspace(tmp_path)
    yield Worker(
        workspace=space,
        engine=Engine(threads=1),
        source=quadrants(20),
        held_out=0.0,
        on_progress=steps.append,
    )
    space.close()


def task_of(bundle, round_number, attempt=0, **fields):
    data, model = map(reference, blobs_of(bundle))
    least = {"kind": "train", "batch_size": 8, "lr": "0.1", "bounds": BOUNDS, "seed": round_number}
    return Task(
        run=RUN,
        round=round_number,
        attempt=attempt,
        nonce="b" * 16,
        bundle=data,
        model=model,
        deadline=60,
        **{**least, **fields},
    )


HANDED_ON = [{"momentum": "0.9", "keep_momentum": True}, {"codec": "int8"}]


def updates(worker, wire, *tasks):
    for task in tasks:
        worker.perform(task, wire, wire, lambda: False)
    return wire.delivered


@pytest.mark.parametrize("fields", HANDED_ON, ids=["velocity", "residual"])
@pytest.mark.parametrize("first", [True, False, None], ids=["accepted", "refused", "unanswered"])
def test_an_attempt_that_is_repeated_gives_the_same_update(worker, wire, bundle, fields, first):
    updates(worker, wire, task_of(bundle, 1, **fields))
    wire.accepts = first
    try:
        updates(worker, wire, task_of(bundle, 2, **fields))
    except BrokerError:
        assert first is None
    wire.accepts = True
    updates(worker, wire, task_of(bundle, 2, attempt=1, **fields))
    assert wire.delivered[-1] == wire.delivered[1]


@pytest.mark.parametrize("fields", HANDED_ON, ids=["velocity", "residual"])
@pytest.mark.parametrize("counted", [True, False])
def test_an_update_that_a_task_overtakes_before_its_receipt_is_settled_first(
    worker, wire, bundle, fields, counted
):
    wire.accepts = None
    with pytest.raises(BrokerError):
        updates(worker, wire, task_of(bundle, 1, **fields))
    wire.accepts = counted
    updates(worker, wire, task_of(bundle, 2, seed=1, **fields))
    first, again, second = wire.delivered
    assert again == first
    assert (second == first) == (not counted)


@pytest.mark.parametrize("fields", HANDED_ON, ids=["velocity", "residual"])
def test_an_accepted_update_is_gone_on_from(worker, wire, bundle, fields):
    first, second = updates(worker, wire, *(task_of(bundle, n, seed=7, **fields) for n in (1, 2)))
    assert first != second


def test_an_update_that_what_was_lost_brings_over_the_bound_is_not_offered(worker, wire, bundle):
    past = Offer(**key_of(task_of(bundle, 1)), blob=reference(b"past"), examples=5)
    lost = {spec.name: np.full(spec.shape, 65, np.float32) for spec in bundle.manifest.trainable}
    worker.workspace.set_pending(past, b"past", residual=encode(lost))
    worker.workspace.clear_pending(accepted=True)
    with pytest.raises(TensorError, match="exceeds the bound 64"):
        updates(worker, wire, task_of(bundle, 2, codec="fp16"))
    assert wire.delivered == []


def test_compression_that_is_not_installed_is_declined_before_the_training(
    worker, wire, bundle, steps, monkeypatch
):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ProtocolError, match=r"cannot be compressed .* pip install 'edge-sdk-fl\[zstd\]'"):
        updates(worker, wire, task_of(bundle, 1, compression="zstd"))
    assert (steps, wire.sent) == ([], [])


def test_an_evaluation_that_is_cancelled_ends_between_two_batches(bundle):
    runtime = Engine(threads=1).open(bundle)
    with pytest.raises(Cancelled):
        evaluate(runtime, bundle.manifest, quadrants(8), np.arange(8), cancelled=lambda: True)
