"""A device and a server together, over memory: what is learnt, when, and from whose data."""

import sqlite3
import threading
import time

import numpy as np
import pytest
import torch
from fleets import FLEET, Deaf, Fleet, Thread
from quadrants import quadrants
from torch.nn import functional
from waiting import until

from edge_sdk import RunError
from edge_sdk.data import batches, split_held_out
from edge_sdk.errors import BrokerError, DataError, RefusedError
from edge_sdk.protocol.messages import Declined, Offer, Task, Welcome, Who, encode, number
from edge_sdk.runtime import open_runtime
from edge_sdk.tensors import decode
from edge_server.replay import replay
from edge_server.store import Store
from edge_simulation import simulate


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def updates_of(fleet, bundle, round_number=1, work_dir="server"):
    """(device, tensors, examples) of a round, from the store."""
    store = Store(fleet.folder / work_dir, exclusive=False)
    try:
        row = [r for r in store.rounds(store.runs()[-1].id) if r.round == round_number][-1]
        return [
            (u.device, decode(store.blob(u.hash), bundle.manifest.specs), u.examples)
            for u in store.results(row)
        ]
    finally:
        store.close()


def images_of(data):
    return torch.tensor(data.images).float().unsqueeze(1) / 255


def test_an_update_is_what_pytorch_makes_of_the_same_weights_batches_and_rate(fleet, norm, norm_model):
    data = quadrants(37)
    _, server = fleet.serve(norm, epochs=2, lr=0.05, weight_decay=0.01)
    device = fleet.device("d", data)
    server.result()
    device.result()
    (_, task), *_ = fleet.heard(Task)
    model = torch.nn.Module.requires_grad_(norm_model, True).train()
    before = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    optimiser = torch.optim.SGD(model.parameters(), lr=number(task.lr), weight_decay=0.01)
    try:
        for batch in batches(37, batch_size=8, epochs=2, seed=task.seed):
            optimiser.zero_grad()
            loss = functional.cross_entropy(model(images_of(data)[batch]), torch.tensor(data.labels[batch]))
            loss.backward()
            optimiser.step()
        after = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    finally:
        model.load_state_dict(before)
    ((_, update, examples),) = updates_of(fleet, norm)
    assert examples == 37
    for name, value in update.items():
        expected = (before[name] - after[name]).numpy()
        scale = np.abs(expected).max()
        # The bias before a BatchNorm has no gradient: its update is rounding.
        floor = 1e-6 if name == "conv.bias" else 0
        assert np.abs(value - expected).max() <= 1e-4 * scale + floor, name


def test_a_round_is_the_mean_in_python_integers_of_the_devices_own_updates(fleet, norm):
    _, server = fleet.serve(norm, participants=3, min_devices=3, lr=0.1)
    for number_, size in enumerate((5, 12, 31)):
        fleet.device(f"d{number_}", quadrants(size, seed=number_))
    outcome = server.result()
    updates = updates_of(fleet, norm)
    assert sorted(examples for _, _, examples in updates) == [5, 12, 31]
    (_, task), *_ = fleet.heard(Task)
    for parameter in norm.manifest.parameters:
        name, before = parameter.name, norm.weights[parameter.name].reshape(-1)
        found = outcome.bundle.weights[name].reshape(-1)
        for index in range(before.size):
            values = [(update[name].reshape(-1)[index], n) for _, update, n in updates]
            if parameter.rule == "counter":
                expected = before[index] + max(-int(value) for value, _ in values)
            else:
                scale = 1 << task.exponents[parameter.rule]
                total = sum(round(float(value) * scale) * n for value, n in values)
                expected = np.float32(float(before[index]) - float(total) / float(scale * 48))
            assert found[index] == expected, (name, index)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedavg"},
        {"strategy": "fedavgm"},
        {"strategy": "fedavgm", "nesterov": False},
        {"strategy": "fedadam", "beta2": 0.9},
        {"aggregation": "median"},
        {"aggregation": "trimmed_mean", "trim": 0.4},
        {"max_norm": 0.01, "over_norm": "clip"},
    ],
)
def test_a_replay_gives_the_runs_bits(fleet, norm, settings):
    _, server = fleet.serve(norm, rounds=4, participants=2, min_devices=3, server_lr=0.7, **settings)
    for number_ in range(3):
        fleet.device(f"d{number_}", quadrants(10 + number_, seed=number_))
    outcome = server.result()
    store = Store(fleet.folder / "server", exclusive=False)
    replayed = list(replay(store, store.runs()[-1]))
    store.close()
    assert [(r.round, r.same) for r in replayed] == [(n, True) for n in (1, 2, 3, 4)]
    assert len(outcome.rounds) == 4


def test_a_fleet_learns(fleet, norm):
    test = quadrants(200, seed=99)
    _, server = fleet.serve(
        norm, rounds=5, participants=3, min_devices=3, lr=0.2, eval_data=test, evaluation="server"
    )
    for number_ in range(3):
        fleet.device(f"d{number_}", quadrants(40, seed=number_))
    outcome = server.result()
    runtime = open_runtime(outcome.bundle, threads=1)
    runtime_accuracy = np.mean(runtime.predict(images_of(test).numpy()).argmax(1) == test.labels)
    assert outcome.evaluation.accuracy == pytest.approx(float(runtime_accuracy), abs=1e-9)
    assert runtime_accuracy > 0.8


def test_predictions_come_from_the_newest_model(fleet, norm):
    arrived = threading.Event()
    client = fleet.client("d", quadrants(20), on_model=arrived.set)
    with pytest.raises(RunError, match="no model has arrived"):
        client.predict(quadrants(3).images)
    _, server = fleet.serve(norm, rounds=2)
    device = fleet.start(client)
    assert arrived.wait(30)
    outcome = server.result()
    assert device.result() == 2
    expected = open_runtime(outcome.bundle, threads=1).predict(images_of(quadrants(9)).numpy())
    np.testing.assert_allclose(client.predict(quadrants(9).images), expected, rtol=1e-6, atol=1e-6)
    client.close()


def test_every_accepted_update_is_counted_even_when_the_next_task_is_there_at_once(fleet, norm):
    _, server = fleet.serve(norm, rounds=12)
    device = fleet.device("d", quadrants(6))
    server.result()
    assert device.result() == 12


def test_a_device_that_wants_one_round_leaves_after_one_accepted_update(fleet, norm):
    fleet.serve(norm, rounds=50)
    assert fleet.start(fleet.client("d", quadrants(8)), rounds=1).result() == 1


def test_a_device_that_may_not_train_declines_and_another_takes_over(fleet, norm):
    _, server = fleet.serve(norm, participants=1, min_devices=2)
    fleet.device("no", quadrants(8), may_train=lambda: False)
    fleet.device("yes", quadrants(9))
    server.result()
    assert [device for device, _, _ in updates_of(fleet, norm)] == ["yes"]


def test_a_data_set_that_grows_announces_its_new_size(fleet, norm):
    data = list(quadrants(8))
    _, server = fleet.serve(
        norm, rounds=2, on_round=lambda result: data.extend(quadrants(5, seed=result.round))
    )
    fleet.device("d", data)
    server.result()
    assert fleet.heard(Offer)[0][1].examples == 8
    assert [n for _, _, n in updates_of(fleet, norm, 2)] == [13]


def test_a_generator_is_a_data_set(fleet, norm):
    _, server = fleet.serve(norm, rounds=2)
    fleet.device("d", (example for example in quadrants(11)))
    server.result()
    assert [n for _, _, n in updates_of(fleet, norm, 2)] == [11]


def test_an_evaluation_on_devices_is_the_sum_over_their_held_out_examples(fleet, norm):
    sets = {f"d{n}": quadrants(20 + 7 * n, seed=n) for n in range(3)}
    _, server = fleet.serve(norm, participants=3, min_devices=3, evaluation="devices")
    for name, data in sets.items():
        fleet.device(name, data, held_out=0.25)
    outcome = server.result()
    runtime = open_runtime(outcome.bundle, threads=1)
    loss = correct = examples = 0
    for data in sets.values():
        held = split_held_out(len(data), 0.25, 0)[1]
        logits = torch.tensor(runtime.predict(images_of(data).numpy()[held])).double()
        labels = torch.tensor(data.labels[held])
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        examples += len(held)
    assert outcome.evaluation.examples == examples
    assert outcome.evaluation.accuracy == correct / examples
    assert outcome.evaluation.loss == pytest.approx(loss / examples, rel=1e-4)


def test_what_is_held_out_is_not_trained_on(fleet, norm):
    _, server = fleet.serve(norm)
    fleet.device("d", quadrants(40), held_out=0.25)
    server.result()
    assert [n for _, _, n in updates_of(fleet, norm)] == [40 - len(split_held_out(40, 0.25, 0)[1])]


def test_an_example_that_does_not_fit_ends_the_device_and_declines_the_task(fleet, norm):
    data = list(quadrants(8))
    data[3] = (data[3][0], 7)
    fleet.serve(norm)
    device = fleet.device("d", data)
    with pytest.raises(DataError, match="example 3: label 7, expected 0 to 3"):
        device.result()
    assert "label 7" in fleet.heard(Declined)[0][1].reason


def test_an_empty_data_set_is_refused_at_once(fleet):
    with pytest.raises(DataError, match="empty"):
        fleet.client("d", [])


def test_a_device_without_a_server_gives_up_in_time(fleet):
    with pytest.raises(BrokerError, match="no server has answered device d"):
        fleet.device("d", quadrants(5), join_timeout=0.5).result(20)


def test_a_second_device_with_an_id_in_use_is_refused_and_the_first_goes_on(fleet, norm):
    _, server = fleet.serve(norm, min_devices=2, participants=1)
    first = fleet.device("same", quadrants(8))
    until(lambda: fleet.heard(Welcome))
    with pytest.raises(RefusedError, match="id is in use"):
        fleet.device("same", quadrants(8), work_dir="other").result(20)
    fleet.device("another", quadrants(8))
    server.result()
    first.result()


def test_a_device_that_was_stopped_before_it_ran_does_not_run(fleet):
    client = fleet.client("d", quadrants(5))
    client.stop()
    assert fleet.start(client).result(20) == 0


def test_a_client_in_a_folder_in_use_is_refused(fleet):
    with fleet.client("d", quadrants(5)), pytest.raises(RunError, match="in use"):
        fleet.client("d", quadrants(5))


def test_a_check_in_with_time_trains_and_leaves(fleet, norm):
    fleet.serve(norm, rounds=3, participants=1)
    client = fleet.client("d", quadrants(8))
    visit = Thread(lambda: client.check_in(4.0)).result()
    assert visit.accepted >= 1
    client.close()


def test_a_check_in_without_work_is_told_when_to_come_back(fleet, norm):
    _, server = fleet.serve(norm, participants=1, deadline=90)
    blocked, training = threading.Event(), threading.Event()

    def wait_in_training(_):
        training.set()
        blocked.wait(60)

    worker = fleet.device("worker", quadrants(8), on_progress=wait_in_training)
    assert training.wait(30)
    with fleet.client("visitor", quadrants(8)) as visitor:
        visit = Thread(lambda: visitor.check_in(30.0)).result(20)
    blocked.set()
    assert visit.accepted == 0
    assert 1 <= visit.come_back <= 90
    server.result()
    worker.result()


def test_a_finished_update_is_handed_in_at_the_next_visit_without_training_again(fleet, norm):
    _, server = fleet.serve(norm, deadline=90, grace=30)
    steps = []
    ears = Deaf(fleet.broker.transport(), {"grant", "receipt"})
    client = fleet.client("d", quadrants(16), transport=ears, on_progress=steps.append)
    assert Thread(lambda: client.check_in(4.0)).result().accepted == 0
    assert fleet.heard(Offer)
    ears.deaf_to.clear()
    assert Thread(lambda: client.check_in(20.0)).result().accepted == 1
    assert len(steps) == 2
    server.result()
    client.close()


def test_a_run_that_has_ended_says_so(fleet, norm):
    _, server = fleet.serve(norm)
    fleet.device("d", quadrants(8))
    server.result()
    with pytest.raises(RunError, match="has ended after 1 rounds"):
        fleet.serve(norm)[1].result()


def test_another_runs_settings_do_not_go_on_with_an_unfinished_run(fleet, norm):
    begun = threading.Event()
    server, thread = fleet.serve(norm, rounds=1000, on_round=lambda _: begun.set())
    fleet.device("a", quadrants(9))
    assert begun.wait(60)
    server.stop()
    assert not thread.result().finished
    with pytest.raises(RunError, match="other settings"):
        fleet.serve(norm, rounds=1001)[1].result()


def test_a_run_that_waits_says_for_whom(fleet, norm):
    fleet.serve(norm, min_devices=2)
    fleet.device("a", quadrants(9))
    until(lambda: "round 1 waits: 1 of 2 devices are here" in fleet.status)


def test_a_second_server_on_a_fleet_gives_way(fleet, norm):
    begun = time.monotonic()
    _, first = fleet.serve(norm, min_devices=1)
    until(lambda: time.monotonic() > begun + 1.5)
    _, second = fleet.serve(norm, work_dir="other")
    with pytest.raises(RunError, match="another server serves fleet"):
        second.result()
    fleet.device("a", quadrants(9))
    assert first.result().finished


def say_as_a_server(fleet, *, token, age, times=1):
    voice = fleet.broker.transport()
    voice.connect(None, timeout=1)
    for _ in range(times):
        voice.publish(f"edge/v1/{FLEET}/all/who", encode(Who(jitter=2, server=token, age=age)))


def test_of_two_servers_that_find_each_other_late_the_younger_gives_way(fleet, norm):
    _, server = fleet.serve(norm, min_devices=1)
    say_as_a_server(fleet, token="0" * 16, age=3600)
    with pytest.raises(RunError, match="another server serves fleet"):
        server.result()


def test_the_elder_goes_on_and_does_not_answer_every_word(fleet, norm):
    _, server = fleet.serve(norm, min_devices=1)
    say_as_a_server(fleet, token="0" * 16, age=0, times=500)
    fleet.device("a", quadrants(9))
    assert server.result().finished
    assert len([who for _, who in fleet.heard(Who) if who.server != "0" * 16]) <= 3


def test_a_stopped_client_stays_stopped(fleet, norm):
    fleet.serve(norm)
    client = fleet.client("a", quadrants(9))
    client.stop()
    assert client.run() == 0
    assert not client.check_in(60).accepted


def test_a_client_takes_part_once_at_a_time(fleet, norm):
    fleet.serve(norm, min_devices=2)
    client = fleet.client("a", quadrants(9))
    fleet.start(client)
    until(lambda: fleet.heard(Welcome, "a"))
    with pytest.raises(RunError, match="takes part already"):
        client.run()


def test_a_new_model_is_told_of_once(fleet, norm):
    told = []
    _, thread = fleet.serve(norm, rounds=2, evaluation="devices")
    client = fleet.client("a", quadrants(30), held_out=0.2, on_model=lambda: told.append(newest(fleet)))
    fleet.start(client)
    assert thread.result().finished
    until(lambda: len(told) == 3)
    assert len(set(told)) == 3


def newest(fleet):
    return (fleet.folder / "devices" / "a" / "newest.json").read_bytes()


def test_a_start_that_found_too_few_devices_may_be_mended(fleet, norm):
    with pytest.raises(RunError, match="lower --min-devices"):
        fleet.serve(norm, min_devices=2, join_timeout=0.1)[1].result()
    _, thread = fleet.serve(norm, min_devices=1)
    fleet.device("a", quadrants(9))
    assert thread.result().finished


def test_too_few_devices_at_the_start_are_counted_and_named(fleet, norm):
    _, server = fleet.serve(norm, min_devices=3, join_timeout=2.0)
    fleet.device("d", quadrants(8))
    with pytest.raises(RunError, match=r"of the 3 devices that the run needs .* lower --min-devices"):
        server.result()


def weights_of(bundle):
    return {name: array.tobytes() for name, array in bundle.weights.items()}


def test_a_stopped_run_goes_on_and_ends_with_the_bits_of_an_undisturbed_one(fleet, norm, tmp_path):
    settings = {"rounds": 4, "participants": 2, "min_devices": 4, "strategy": "fedavgm"}
    sets = {f"d{n}": quadrants(10 + 3 * n, seed=n) for n in range(4)}
    undisturbed = Fleet(tmp_path / "undisturbed")
    with undisturbed:
        _, thread = undisturbed.serve(norm, **settings)
        for name, data in sets.items():
            undisturbed.device(name, data)
        expected = weights_of(thread.result().bundle)

    third_round, in_third, go_on = threading.Event(), threading.Event(), threading.Event()

    def hold(_):
        if third_round.is_set():
            in_third.set()
            go_on.wait(60)

    server, thread = fleet.serve(
        norm, on_round=lambda result: third_round.set() if result.round == 2 else None, **settings
    )
    for name, data in sets.items():
        fleet.device(name, data, on_progress=hold)
    assert in_third.wait(60)
    server.stop()
    assert not thread.result().finished
    go_on.set()
    _, thread = fleet.serve(norm, **settings)
    outcome = thread.result()
    assert outcome.finished
    assert [r.round for r in outcome.rounds] == [1, 2, 3, 4]
    assert weights_of(outcome.bundle) == expected


def test_one_server_object_goes_on_with_its_run(fleet, norm):
    server, thread = fleet.serve(norm, min_devices=1)
    server.stop()
    assert not thread.result().finished
    again = Thread(server.run)
    fleet.device("d", quadrants(8))
    assert again.result().finished


def test_a_run_whose_server_died_in_its_farewell_ends_without_another_round(fleet, norm):
    _, thread = fleet.serve(norm, rounds=2)
    fleet.device("d", quadrants(8))
    expected = weights_of(thread.result().bundle)
    with sqlite3.connect(fleet.folder / "server" / "edge.sqlite") as database:
        database.execute("UPDATE runs SET ended = 0")
    outcome = fleet.serve(norm, rounds=2)[1].result()
    assert outcome.finished
    assert len(outcome.rounds) == 2
    assert weights_of(outcome.bundle) == expected


def test_a_round_that_is_repeated_leaves_no_trace_in_what_devices_keep(fleet, norm):
    asked = []

    def unwilling_in_the_second_round():
        asked.append(True)
        return len(asked) != 2

    settings = {"rounds": 3, "participants": 2, "min_devices": 2, "min_participants": 2, "codec": "int8"}
    data = {f"d{number}": quadrants(20 + number, seed=number) for number in range(2)}
    _, server = fleet.serve(norm, **settings)
    fleet.device("d0", data["d0"])
    fleet.device("d1", data["d1"], may_train=unwilling_in_the_second_round)
    outcome = server.result()
    assert {(task.round, task.attempt) for _, task in fleet.heard(Task)} == {(1, 0), (2, 0), (2, 1), (3, 0)}
    # The engine repeats no round.
    assert weights_of(outcome.bundle) == {
        name: weight.tobytes()
        for name, weight in simulate(norm, fleet.config(**settings), data).weights.items()
    }
