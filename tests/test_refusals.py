"""What a hand-written device says to a real server: what is refused, why, and that nothing of it counts."""

import numpy as np
import pytest
from fleets import FLEET, FakeDevice, Fleet, Thread
from quadrants import quadrants
from waiting import until

from edge_sdk import DataError
from edge_sdk.protocol import CHUNK_BYTES, Topics, reference
from edge_sdk.protocol.messages import (
    Cancel,
    Declined,
    Finished,
    Grant,
    Join,
    Receipt,
    Ref,
    Refused,
    Task,
    Welcome,
    decode_from_device,
    encode,
)
from edge_sdk.tensors import encode as encode_tensors
from edge_sdk.transport import Received
from edge_server.publication import Publication
from edge_server.store import Store


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def update_of(bundle, value=0.25):
    """An update of one value everywhere; the counter advances by one."""
    zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in bundle.manifest.specs}
    rules = bundle.manifest.rules
    return {n: t - 1 if rules[n] == "counter" else t + np.float32(value) for n, t in zeros.items()}


def less(bundle, value):
    """The bundle's weights less ``value``, with the counter advanced by one."""
    rules = bundle.manifest.rules
    return {
        name: (weight + 1 if rules[name] == "counter" else weight - np.float64(value)).astype(weight.dtype)
        for name, weight in bundle.weights.items()
    }


def assert_same_bits(weights, expected):
    assert {n: w.tobytes() for n, w in weights.items()} == {n: w.tobytes() for n, w in expected.items()}


def at_work(fleet, name, examples=10):
    """A device that has joined and taken its task."""
    device = FakeDevice(fleet.broker, name)
    device.join(examples)
    task = device.task()
    device.take(task, examples)
    return device, task


def broken(bundle, what):
    update = update_of(bundle)
    if what == "NaN":
        update["head.bias"][2] = np.nan
    elif what == "a value over the bound":
        update["head.bias"][2] = 65
    elif what == "another shape":
        update["head.bias"] = np.zeros(5, np.float32)
    elif what == "another dtype":
        update["head.bias"] = np.zeros(4, np.float64)
    elif what == "a missing tensor":
        del update["head.bias"]
    elif what == "a tensor too many":
        update["extra"] = np.zeros(1, np.float32)
    elif what == "names by position":
        update = {f"tensor{i}": array for i, array in enumerate(update.values())}
    elif what == "a counter as a float":
        update["norm.num_batches_tracked"] = np.array(-1, np.float32)
    elif what == "no safetensors":
        return b"\x80\x04 pickled"
    return encode_tensors(update)


@pytest.mark.parametrize(
    ("what", "examples", "reason"),
    [
        ("NaN", 10, "'head.bias' holds NaN"),
        ("a value over the bound", 10, "'head.bias' exceeds the bound 64"),
        ("another shape", 10, "'head.bias' is"),
        ("another dtype", 10, "'head.bias' is"),
        ("a missing tensor", 10, "'head.bias' is missing"),
        ("a tensor too many", 10, "'extra' is not part of this model"),
        ("names by position", 10, "is missing"),
        ("a counter as a float", 10, "'norm.num_batches_tracked' is"),
        ("no safetensors", 10, "not a valid safetensors file"),
        ("nothing", 0, "0 examples are not between 1 and 131072"),
        ("nothing", 11, "11 examples, but 10 were declared"),
        ("nothing", 1 << 40, "are not between 1 and"),
    ],
)
def test_a_bad_update_is_refused_with_its_reason_and_nothing_of_it_counts(
    fleet, paper, what, examples, reason
):
    _, server = fleet.serve(paper)
    bad, task = at_work(fleet, "bad")
    good = FakeDevice(fleet.broker, "good")
    good.join()
    receipt = bad.hand_in(task, broken(paper, what), examples=examples)
    assert not receipt.accepted
    assert reason in receipt.reason
    task = good.task()
    assert good.hand_in(task, encode_tensors(update_of(paper, 0.5))).accepted
    bad.leave()
    good.end()
    outcome = server.result()
    assert_same_bits(outcome.bundle.weights, less(paper, 0.5))
    assert outcome.rounds[0].participants == 1


def test_an_update_over_the_models_size_is_refused_before_it_is_sent(fleet, paper):
    fleet.serve(paper)
    bad, task = at_work(fleet, "bad")
    bad.offer(task, b"", ref=Ref(hash="0" * 64, size=1 << 30, chunk=1 << 20))
    assert "over this model's limit" in bad.wait_for(Receipt).reason


def test_an_update_that_comes_twice_counts_once(fleet, paper):
    _, server = fleet.serve(paper, participants=2, min_devices=2)
    first, second = FakeDevice(fleet.broker, "a"), FakeDevice(fleet.broker, "b")
    for device in (first, second):
        device.join()
    task, data = first.task(), encode_tensors(update_of(paper, 1.0))
    first.take(task)
    for _ in range(3):
        assert first.hand_in(task, data).accepted
        first.send_chunks(reference(data), data)
    assert second.hand_in(second.task(), encode_tensors(update_of(paper, 0.0))).accepted
    for device in (first, second):
        device.end()
    outcome = server.result()
    assert_same_bits(outcome.bundle.weights, less(paper, 0.5))
    assert outcome.rounds[0].examples == 20


def test_another_update_of_the_same_device_is_refused(fleet, paper):
    fleet.serve(paper, participants=2, min_devices=2)
    device = FakeDevice(fleet.broker, "a")
    other = FakeDevice(fleet.broker, "b")
    other.join()
    device.join()
    task = device.task()
    assert device.hand_in(task, encode_tensors(update_of(paper, 1.0))).accepted
    second = device.hand_in(task, encode_tensors(update_of(paper, 2.0)))
    assert "has delivered another update" in second.reason


def test_a_device_that_was_not_asked_is_refused(fleet, paper):
    fleet.serve(paper)
    _, task = at_work(fleet, "asked")
    other = FakeDevice(fleet.broker, "other")
    other.join()
    receipt = other.hand_in(task, encode_tensors(update_of(paper)))
    assert "was not asked in round 1" in receipt.reason


def test_a_late_update_is_refused_with_the_round_that_is_open(fleet, paper):
    _, server = fleet.serve(paper, rounds=2, over_selection=2.0, min_devices=2)
    devices = [FakeDevice(fleet.broker, name) for name in "ab"]
    for device in devices:
        device.join()
    fast, slow = devices
    tasks = {device.id: device.task() for device in devices}
    assert fast.hand_in(tasks["a"], encode_tensors(update_of(paper, 1.0))).accepted
    assert slow.wait_for(Cancel).round == 1
    slow.wait_for(Task, where=lambda task: task.round == 2)
    late = slow.hand_in(tasks["b"], encode_tensors(update_of(paper, 3.0)))
    assert not late.accepted
    assert late.reason == "round 1 (attempt 0) is closed; round 2 is open"
    task = fast.wait_for(Task, where=lambda task: task.round == 2)
    assert fast.hand_in(task, encode_tensors(update_of(paper, 1.0))).accepted
    for device in devices:
        device.end()
    weights = server.result().bundle.weights
    np.testing.assert_allclose(weights["head.bias"], paper.weights["head.bias"] - 2.0, atol=1e-6)


def test_a_receipt_that_was_lost_is_given_again_after_the_round(fleet, paper):
    fleet.serve(paper, rounds=2)
    device, task = at_work(fleet, "a")
    data = encode_tensors(update_of(paper))
    assert device.hand_in(task, data).accepted
    device.wait_for(Task, where=lambda task: task.round == 2)
    assert device.hand_in(task, data).accepted


def test_a_whole_that_is_not_what_was_announced_is_refused(fleet, paper):
    fleet.serve(paper)
    device, task = at_work(fleet, "a")
    data = encode_tensors(update_of(paper))
    offer = device.offer(task, data)
    device.wait_for(Grant)
    device.send_chunks(offer.blob, bytes(len(data)))
    receipt = device.wait_for(Receipt)
    assert not receipt.accepted
    assert "SHA-256" in receipt.reason


def test_what_is_malformed_does_not_disturb_a_round(fleet, paper):
    _, server = fleet.serve(paper)
    device, task = at_work(fleet, "a")
    noise = fleet.broker.transport()
    noise.connect(None, timeout=1)
    for kind in ("join", "offer", "chunk", "report", "grant", "unheard-of"):
        for payload in (b"", b"\xff" * 100, b"{}", b"[" * 16_000, b'{"type":"join"}'):
            noise.publish(f"edge/v1/{FLEET}/up/a/{kind}", payload)
            noise.publish(f"edge/v1/{FLEET}/up/$x..y/{kind}", payload)
    device.send(Grant(blob="0" * 64, start=1 << 53, stop=0))
    assert device.hand_in(task, encode_tensors(update_of(paper))).accepted
    device.end()
    assert server.result().finished


def test_a_model_can_be_had_by_asking_alone(fleet, paper):
    fleet.serve(paper)
    device, task = at_work(fleet, "a")
    assert_same_bits(device.download(task.model, paper.manifest.specs), paper.weights)


def test_a_device_of_another_protocol_is_told_so(fleet, paper):
    fleet.serve(paper)
    device = FakeDevice(fleet.broker, "a")
    device.send(Join(protocol=2, sdk="9", install="a" * 32, boot="b" * 16, nonce=device.nonce, examples=1))
    assert device.wait_for(Refused).code == "protocol"


def test_a_device_that_goes_is_replaced_in_the_same_round(fleet, paper):
    fleet.serve(paper)
    device, task = at_work(fleet, "a")
    other = FakeDevice(fleet.broker, "b")
    other.join()
    device.leave()
    replacement = other.task()
    assert (replacement.round, replacement.attempt) == (task.round, task.attempt)


def test_a_task_that_nobody_takes_is_sent_again(fleet, paper):
    fleet.serve(paper)
    device = FakeDevice(fleet.broker, "a")
    device.join()
    assert device.task() is not None
    assert device.task() is not None


def test_a_round_that_falls_short_is_repeated_and_its_update_is_not_aggregated(fleet, paper):
    _, server = fleet.serve(paper, participants=2, min_participants=2, min_devices=2)
    one, two = FakeDevice(fleet.broker, "a"), FakeDevice(fleet.broker, "b")
    for device in (one, two):
        device.join()
    assert one.hand_in(one.task(), encode_tensors(update_of(paper, 32.0))).accepted
    task = two.task()
    two.send(Declined(run=task.run, round=task.round, attempt=task.attempt, kind="train", reason="battery"))
    for device in (one, two):
        task = device.wait_for(Task, where=lambda task: task.attempt == 1)
        assert device.hand_in(task, encode_tensors(update_of(paper, 0.5))).accepted
    for device in (one, two):
        device.end()
    assert_same_bits(server.result().bundle.weights, less(paper, 0.5))
    assert any("is repeated" in sentence for sentence in fleet.status)


def test_a_device_that_joins_in_the_farewell_is_told_that_the_run_has_ended(fleet, paper):
    fleet.serve(paper)
    device, task = at_work(fleet, "a")
    assert device.hand_in(task, encode_tensors(update_of(paper))).accepted
    device.wait_for(Finished)
    late = FakeDevice(fleet.broker, "late")
    late.join()
    late.wait_for(Finished)
    for each in (device, late):
        each.leave()


def test_a_model_that_has_diverged_is_reported_in_a_sentence(fleet, norm):
    """A hand-written server asks a real device to evaluate a model whose logits are not finite."""
    desk = fleet.broker.transport()
    topics = Topics(FLEET)
    desk.connect(None, timeout=1)
    desk.subscribe(topics.up("+", "+"))
    out = Publication(desk, topics, chunk=CHUNK_BYTES)
    huge = {n: w if w.dtype == np.int64 else np.full_like(w, 1e30) for n, w in norm.weights.items()}
    bundle, model = out.announce(norm.data), out.announce(encode_tensors(huge))
    device = fleet.device("d", quadrants(20), held_out=0.5)

    def serve():
        while True:
            event = desk.receive(30)
            if not isinstance(event, Received):
                continue
            message = decode_from_device(topics.parse(event.topic).kind, event.payload)
            if isinstance(message, Join):
                run = "a" * 32
                welcome = Welcome(nonce=message.nonce, run=run, bundle=bundle, model=model, heartbeat=20)
                task = Task(
                    run=run,
                    round=1,
                    attempt=0,
                    kind="evaluate",
                    nonce=message.nonce,
                    bundle=bundle,
                    model=model,
                    deadline=60,
                )
                for kind, answer in (("welcome", welcome), ("task", task)):
                    desk.publish(topics.down("d", kind), encode(answer))
            elif isinstance(message, Grant):
                out.serve("d", message)
            elif isinstance(message, Declined):
                return message

    out.send_all()
    assert "has diverged" in Thread(serve).result().reason
    assert device.is_alive()


def test_evaluation_data_that_does_not_fit_is_refused_before_the_run(fleet, norm):
    data = list(quadrants(3))
    data[0] = (data[0][0], 9)
    with pytest.raises(DataError, match="example 0: label 9"):
        fleet.serve(norm, eval_data=data, evaluation="server")


def test_what_a_device_has_declared_holds_over_a_servers_restart(fleet, norm):
    server, thread = fleet.serve(norm)
    device = FakeDevice(fleet.broker, "d")
    device.join()
    task = device.task()
    device.take(task, examples=10)
    until(lambda: declared(fleet, task))
    server.stop()
    thread.result()
    _, again = fleet.serve(norm)
    device.join()
    device.take(task, examples=None)
    device.offer(task, encode_tensors(update_of(norm)), examples=11)
    assert "but 10 were declared" in device.wait_for(Receipt).reason
    fleet._ends[-1][0]()
    again.result()


def declared(fleet, task):
    return Store(fleet.folder / "server", exclusive=False).declared("d", task)


@pytest.mark.parametrize(("size", "chunk"), [(1 << 21, 1 << 28), (1 << 30, 1024)])
def test_chunks_that_no_broker_would_deliver_are_refused_before_any_is_granted(fleet, norm, size, chunk):
    fleet.serve(norm)
    device = FakeDevice(fleet.broker, "d")
    device.join()
    task = device.task()
    device.take(task)
    device.offer(task, b"", ref=Ref(hash="0" * 64, size=size, chunk=chunk))
    assert not device.wait_for(Receipt).accepted
    assert not fleet.heard(Grant)


def test_a_round_is_closed_at_its_deadline_with_whoever_is_there(fleet, norm):
    results = []
    options = {"participants": 2, "min_devices": 2, "deadline": 3.0}
    _, server = fleet.serve(norm, on_round=results.append, **options)
    quick, slow = FakeDevice(fleet.broker, "quick"), FakeDevice(fleet.broker, "slow")
    for device in (quick, slow):
        device.join()
    slow.take(slow.task())
    assert quick.hand_in(quick.task(), encode_tensors(update_of(norm))).accepted
    assert "complete" in slow.wait_for(Cancel).reason
    for device in (quick, slow):
        device.end()
    after = server.result().bundle.weights
    assert results[0].participants == 1
    for name, expected in less(norm, 0.25).items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
