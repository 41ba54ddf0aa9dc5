"""All four papers at once: in one process, and over a wire with clients, the same bits."""

import numpy as np
import pytest
from fleets import Fleet
from quadrants import quadrants

from edge_sdk import Sharing
from edge_server.replay import replay
from edge_server.store import Store
from edge_simulation import simulate

EVERYTHING = Sharing(histogram=True, descriptor=True, statistics=True, withhold_below=3)


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def shares():
    """Six devices with two classes each, class 0 the rarest."""
    data = quadrants(400, seed=1)
    found = {}
    for number in range(6):
        counts = {number % 4: 9 + number, (number + 1) % 4: 4}
        counts = {label: min(count, 4) if label == 0 else count for label, count in counts.items()}
        chosen = [np.flatnonzero(data.labels == label)[:count] for label, count in counts.items()]
        found[f"d{number}"] = data.take(np.concatenate(chosen))
    return found


def test_the_whole_stack_has_the_same_bits_in_one_process_and_over_a_wire(fleet, describing):
    settings = {
        "rounds": 3,
        "participants": 4,
        "min_devices": 6,
        "strategy": "fedavgm",
        "selection": "grouped",
        "chain": 2,
        "chain_passes": 2,
        "augmentation": 1.0,
        "calibration": "ccvr",
        "virtual_features": 50,
    }
    lines = []
    _, server = fleet.serve(describing, on_round=lines.append, **settings)
    for name, data in shares().items():
        fleet.device(name, data, sharing=EVERYTHING)
    over_the_wire = server.result().bundle.weights
    simulated = simulate(describing, fleet.config(**settings), shares(), withhold_below=3)
    for name, expected in simulated.weights.items():
        np.testing.assert_array_equal(over_the_wire[name], expected, err_msg=name)
    for line, expected in zip(lines, simulated.rounds, strict=False):
        assert (line.participants, line.examples, line.chains) == (4, expected.examples, 2)
        assert (line.bytes_up, line.bytes_down) == (expected.bytes_up, expected.bytes_down)
        assert line.divergence == expected.divergence


@pytest.mark.parametrize(("codec", "compression"), [("int8", "zstd"), ("fp16", "none")])
def test_codecs_lose_the_same_in_one_process_and_over_a_wire(fleet, norm, codec, compression):
    settings = {"rounds": 4, "participants": 2, "min_devices": 3, "codec": codec, "compression": compression}
    lines = []
    data = {f"d{number}": quadrants(20 + number, seed=number) for number in range(3)}
    _, server = fleet.serve(norm, on_round=lines.append, **settings)
    for name, mine in data.items():
        fleet.device(name, mine)
    over_the_wire = server.result().bundle.weights
    simulated = simulate(norm, fleet.config(**settings), data)
    for name, expected in simulated.weights.items():
        np.testing.assert_array_equal(over_the_wire[name], expected, err_msg=name)
    assert [line.bytes_up for line in lines] == [line.bytes_up for line in simulated.rounds]
    store = Store(fleet.folder / "server", exclusive=False)
    assert [r.same for r in replay(store, store.runs()[-1])] == [True] * 4
