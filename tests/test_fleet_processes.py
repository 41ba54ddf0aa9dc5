"""Whole fleets of real processes on a real mosquitto: what is killed, stopped, late or wrong."""

import zipfile

import numpy as np
import pytest
from processes import Machine, machine_in
from quadrants import quadrants
from waiting import until

from edge_sdk import Bundle
from edge_sdk.data import save_npz
from edge_sdk.errors import RunError
from edge_server.store import Store
from edge_simulation.broker import MosquittoBroker

LONG = ("--deadline", "60", "--join-timeout", "60")


@pytest.fixture(scope="module")
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


@pytest.fixture
def machine(tmp_path, mosquitto, norm):
    made = machine_in(tmp_path, norm, mosquitto.url)
    save_npz(tmp_path / "many.npz", quadrants(60_000))
    yield made
    made.close()


def rounds_of(machine):
    try:
        store = Store(machine.folder / "server", exclusive=False)
    except RunError:
        return []  # the server has not begun its run yet
    try:
        return [row for run in store.runs() for row in store.rounds(run.id)]
    finally:
        store.close()


def test_the_whole_stack_over_mosquitto_ends_calibrated_and_its_replay_has_the_same_bits(machine, describing):
    describing.write(machine.folder / "model.edge")
    everything = quadrants(400, seed=5)
    for number in range(4):
        of_class = np.flatnonzero(everything.labels == number)[: 12 + 6 * number]
        save_npz(machine.folder / f"class-{number}.npz", everything.take(of_class))
    save_npz(machine.folder / "test.npz", quadrants(100, seed=9))
    server = machine.serve(
        *("--rounds", 2, "--participants", 4, "--selection", "grouped", "--chain", 2),
        *("--augmentation", 0.67, "--strategy", "fedavgm", "--calibration", "ccvr"),
        *("--eval-data", "test.npz", "--keep-updates", *LONG),
    )
    share = ("--share", "histogram,descriptor,statistics", "--withhold-below", 0)
    devices = [machine.device(f"d{n}", *share, data=f"class-{n}.npz") for n in range(4)]
    assert server.wait(120) == 0, server.err
    assert [device.wait() for device in devices] == [0] * 4
    assert [line.split()[0] for line in server.out] == ["round", "round", "calibrated", "wrote"]
    assert "learning rate 0.05, effective 0.5 by the server's momentum" in server.err
    kinds = [(row.kind, len(row.chains)) for row in rounds_of(machine)]
    assert kinds == [("train", 2), ("train", 2), ("statistics", 0)]
    replayed = machine.run("replay", "--work-dir", "server")
    assert replayed.wait() == 0, replayed.out


def updates_of(machine, row):
    store = Store(machine.folder / "server", exclusive=False)
    try:
        return [update.device for update in store.results(row)]
    finally:
        store.close()


def test_three_rounds_with_five_devices_end_with_a_trained_bundle(machine, norm):
    save_npz(machine.folder / "test.npz", quadrants(100, seed=9))
    server = machine.serve(
        *("--rounds", 3, "--participants", 3, "--min-devices", 5, "--eval-data", "test.npz"),
        *("--out", "out/trained.edge", *LONG),
    )
    devices = [machine.device(f"d{number}") for number in range(5)]
    assert server.wait() == 0
    assert [device.wait() for device in devices] == [0] * 5
    trained = Bundle.read(machine.folder / "out" / "trained.edge")
    assert trained.manifest.parameters == norm.manifest.parameters
    assert trained.weights["norm.num_batches_tracked"] == 9
    assert [line.split()[1] for line in server.out[:3]] == ["1/3", "2/3", "3/3"]
    assert server.out[3:] == ["wrote out/trained.edge"]
    assert sum(int(device.out[0].split()[1]) for device in devices) == 9
    assert machine.run("runs", "--work-dir", "server", "--out", "again.edge").wait() == 0
    assert Bundle.read(machine.folder / "again.edge").sha256 == trained.sha256


def test_a_device_that_is_killed_in_a_round_does_not_stop_the_run(machine):
    server = machine.serve(*("--rounds", 2, "--participants", 2, "--min-devices", 2, "--epochs", 20, *LONG))
    machine.device("quick")
    slow = machine.device("slow", data="many.npz")
    wait_for_update(machine, "quick")
    slow.kill()
    server.says("device slow has gone in round 1")
    machine.device("spare")
    assert server.wait() == 0
    assert set(updates_of(machine, rounds_of(machine)[0])) == {"quick", "spare"}


def wait_for_update(machine, device):
    def there():
        return any(device in updates_of(machine, row) for row in rounds_of(machine))

    until(there, 60, f"an update of {device}")


def test_a_device_that_joins_late_is_used(machine):
    server = machine.serve("--rounds", 200, "--participants", 2, "--min-devices", 2, *LONG)
    for name in ("a", "b"):
        machine.device(name)
    server.says("round   1/200")
    machine.device("late")
    wait_for_update(machine, "late")
    first = next(row for row in rounds_of(machine) if "late" in updates_of(machine, row))
    assert first.round > 1
    server.interrupt()
    assert server.wait(30) == 130


def test_a_server_that_is_killed_goes_on_with_the_same_command_and_the_same_bits(machine):
    options = ("--rounds", 30, "--participants", 3, "--min-devices", 3, "--keep-updates", *LONG)
    options += ("--strategy", "fedavgm", "--momentum", 0.5)
    server = machine.serve(*options)
    devices = [machine.device(name) for name in "abc"]
    server.says("round  3/30")
    server.kill()
    server = machine.serve(*options)
    assert server.wait() == 0
    assert [device.wait() for device in devices] == [0, 0, 0]
    replay = machine.run("replay", "--work-dir", "server")
    assert replay.wait() == 0
    assert [line.split()[1] for line in replay.out] == [str(number) for number in range(1, 31)]
    assert all(line.endswith("same bits") for line in replay.out)


def test_a_broker_that_is_killed_and_comes_back_does_not_stop_the_run(machine):
    with MosquittoBroker() as broker:
        machine.url = broker.url
        server = machine.serve("--rounds", 30, "--participants", 2, "--min-devices", 2, *LONG)
        devices = [machine.device(name) for name in "ab"]
        server.says("round  1/30")
        broker.stop(kill=True)
        server.says("the connection to the broker is lost")
        broker.start()
        assert server.wait() == 0
        assert [device.wait() for device in devices] == [0, 0]


def test_chunks_fit_a_broker_that_takes_small_messages(tmp_path, cnn):
    cnn.write(tmp_path / "model.edge")
    save_npz(tmp_path / "data.npz", quadrants(24))
    with MosquittoBroker(extra_config="max_packet_size 20000") as small:
        machine = Machine(tmp_path, small.url)
        server = machine.serve("--rounds", 2, "--participants", 1, *LONG)
        machine.device("a")
        try:
            assert server.wait() == 0
        finally:
            machine.close()


def test_a_second_device_with_an_id_in_use_ends_while_the_first_goes_on(machine):
    machine.serve("--rounds", 1, "--min-devices", 2, "--participants", 1, *LONG)
    first = machine.device("same")
    first.says("welcomed")
    second = machine.device("same", work_dir="devices/second")
    assert second.wait() == 2
    assert second.err == second.errors()
    assert len(second.err) == 1
    assert "id is in use" in second.err[0]
    assert first.running
    machine.device("other")
    assert first.wait() == 0


def test_ctrl_c_ends_a_server_and_a_device_without_a_traceback(machine):
    server = machine.serve("--rounds", 1, "--participants", 2, "--min-devices", 2, *LONG)
    device = machine.device("a", data="many.npz")
    device.says("welcomed")
    for process in (device, server):
        process.interrupt()
        assert process.wait(20) == 130
        assert process.errors() == []
    assert server.err[-1] == "stopped; the same command goes on with this run"


def test_ctrl_c_in_training_ends_a_device(machine):
    machine.serve("--rounds", 1, "--participants", 1, "--epochs", 1000, *LONG)
    device = machine.device("a", data="many.npz")
    wait_for_round(machine)
    device.interrupt()
    assert device.wait(20) == 130
    assert device.errors() == []


def wait_for_round(machine):
    until(lambda: rounds_of(machine), 60)


def assert_refused(process, *texts):
    """Exit status 2 and one line that says why."""
    assert process.wait(60) == 2, (process.out, process.err)
    assert len(process.errors()) == 1, process.err
    for text in texts:
        assert text in process.errors()[0]


def assert_refused_with_one_line(process, *texts):
    assert_refused(process, *texts)
    assert process.err == process.errors()


def test_an_unreachable_broker_is_named(machine):
    machine.url = "mqtt://127.0.0.1:1"
    for process in (machine.serve("--rounds", 1), machine.device("a")):
        assert_refused_with_one_line(process, "no broker at 127.0.0.1:1", "is it running?")


@pytest.fixture
def bad_bundles(machine, norm):
    (machine.folder / "wrong.edge").write_text("no bundle")
    (machine.folder / "truncated.edge").write_bytes(norm.data[: len(norm.data) // 2])
    with (
        zipfile.ZipFile(machine.folder / "model.edge") as original,
        zipfile.ZipFile(machine.folder / "tampered.edge", "w") as archive,
    ):
        for name in original.namelist():
            data = bytearray(original.read(name))
            if name == "weights.safetensors":
                data[-1] ^= 1
            archive.writestr(name, bytes(data))


def test_a_bundle_that_is_none_is_named(machine, bad_bundles):
    names = ("wrong", "truncated", "tampered", "missing")
    started = [
        (name, command)
        for name in names
        for command in (
            machine.serve("--rounds", 1, "--bundle", f"{name}.edge"),
            machine.device(name, "--bundle", f"{name}.edge"),
        )
    ]
    for name, command in started:
        assert_refused_with_one_line(command, f"{name}.edge")


def test_data_that_does_not_fit_is_named_with_its_example(machine):
    data = quadrants(20)
    data.labels[7] = 9
    save_npz(machine.folder / "labels.npz", data)
    np.savez(machine.folder / "shapes.npz", images=np.zeros((5, 9, 8), np.uint8), labels=np.zeros(5, int))
    machine.serve("--rounds", 1, "--participants", 1, *LONG)
    labels = machine.device("a", data="labels.npz")
    assert_refused(labels, "example 7: label 9, expected 0 to 3")
    shapes = machine.device("b", data="shapes.npz")
    assert_refused(shapes, "image has shape [9, 8], expected [8, 8]")


def test_data_that_is_not_there_is_named(machine):
    np.savez(machine.folder / "empty.npz", images=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, int))
    empty, none = machine.device("a", data="empty.npz"), machine.device("b", data="none.npz")
    assert_refused_with_one_line(empty, "empty")
    assert_refused_with_one_line(none, "none.npz")


def test_too_few_devices_end_the_start(machine):
    server = machine.serve("--rounds", 1, "--min-devices", 2, "--join-timeout", "3")
    machine.device("a")
    assert_refused_with_one_line(server, "of the 2 devices", "lower --min-devices")


def test_settings_that_are_wrong_are_named(machine):
    (machine.folder / "types.toml").write_text("bundle = 5\nrounds = 1\n")
    started = {
        "momentum": machine.serve("--rounds", 1, "--strategy", "fedavgm", "--momentum", "1.5"),
        "lr": machine.serve("--rounds", 1, "--lr", "inf"),
        "bundle in the --config file": machine.run("serve", "--config", "types.toml"),
        "server cannot be written": machine.serve("--rounds", 1, "--out", "model.edge/server"),
        "'a/b' is not allowed": machine.device("a/b"),
    }
    for text, process in started.items():
        assert_refused_with_one_line(process, text)
