"""A run's settings: where they come from and what is refused."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from edge_sdk.errors import ProtocolError, RunError
from edge_server import RunConfig
from edge_server.config import make_config, read_toml

LEAST = {"fleet": "f", "rounds": 3}


def test_a_toml_file_gives_the_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('fleet = "f"\nrounds = 7\nlr = 0.1\nparticipants = 0.5\n[bounds]\nmean = 4\n')
    config = make_config(read_toml(path))
    assert (config.rounds, config.lr, config.participants, config.bounds) == (7, 0.1, 0.5, {"mean": 4})


@pytest.mark.parametrize("text", [b"rounds = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(RunError, match=r"run\.toml cannot be read as TOML"):
        read_toml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RunError, match=r"none\.toml"):
        read_toml(tmp_path / "none.toml")


def test_an_unknown_setting_is_named():
    with pytest.raises(RunError, match="momentun"):
        make_config({**LEAST, "momentun": 0.9})


@pytest.mark.parametrize("name", ["fleet", "rounds"])
def test_a_missing_setting_is_named(name):
    with pytest.raises(RunError, match=name):
        make_config({k: v for k, v in LEAST.items() if k != name})


OUT_OF_RANGE = [
    ("rounds", 0),
    ("rounds", 1.5),
    ("rounds", "3"),
    ("strategy", "fedfoo"),
    ("momentum", 1.0),
    ("momentum", -0.1),
    ("momentum", math.nan),
    ("server_lr", 0.0),
    ("participants", 0),
    ("participants", -1),
    ("participants", 1.5),
    ("participants", 0.0),
    ("participants", math.nan),
    ("participants", True),
    ("over_selection", 0.9),
    ("min_devices", -1),
    ("min_participants", 0),
    ("join_timeout", 0.0),
    ("deadline", -1.0),
    ("deadline", math.inf),
    ("deadline", 1e9),
    ("grace", -1.0),
    ("patience", 0.0),
    ("epochs", 0),
    ("batch_size", 0),
    ("lr", 0.0),
    ("lr", math.inf),
    ("lr", math.nan),
    ("weight_decay", -0.1),
    ("weight_decay", math.inf),
    ("schedule", "linear"),
    ("decay", 1.1),
    ("evaluation", "somewhere"),
    ("max_examples", 0),
    ("bounds", {"mean": 41}),
    ("bounds", {"weights": 3}),
    ("seed", -1),
    ("seed", 1 << 54),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_setting_out_of_its_range_is_refused_on_one_line(name, value):
    with pytest.raises(RunError) as error:
        make_config({**LEAST, name: value})
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_setting_out_of_its_range_is_refused_in_python_too(name, value):
    with pytest.raises(RunError, match=name):
        RunConfig(**{**LEAST, name: value}).check()


@pytest.mark.parametrize("fleet", ["", "a/b", "+", ".."])
def test_a_fleet_that_may_not_stand_in_a_topic_is_refused(fleet):
    with pytest.raises(ProtocolError, match="fleet"):
        make_config({**LEAST, "fleet": fleet})


def test_a_start_that_could_overflow_is_refused():
    with pytest.raises(RunError, match="lower the bound or max_examples"):
        make_config({**LEAST, "max_examples": 1 << 32, "bounds": {"mean": 30}})


def test_a_start_whose_whole_cohort_could_overflow_is_refused():
    with pytest.raises(RunError, match="lower the bound or max_examples"):
        make_config({**LEAST, "participants": 4096, "max_examples": 1 << 20})


def test_more_participants_than_a_cohort_may_have_are_refused():
    with pytest.raises(RunError, match="4096"):
        make_config({**LEAST, "participants": 1_000_000})


def test_a_share_of_any_fleet_is_a_cohort_that_cannot_overflow():
    config = make_config({**LEAST, "participants": 0.9})
    assert config.cohort_size(1_000_000) == 4096
    config.precision(config.cohort_size(1_000_000))


def test_a_round_that_could_never_be_complete_is_refused():
    with pytest.raises(RunError, match="min_participants"):
        make_config({**LEAST, "participants": 3, "min_participants": 5})


def test_a_buffer_that_is_full_before_it_may_be_used_is_refused():
    buffered = {**LEAST, "mode": "buffered", "participants": 6, "buffer": 3}
    make_config({**buffered, "min_participants": 3})
    with pytest.raises(RunError, match="min_participants is 4, but a buffer of 3 is full before"):
        make_config({**buffered, "min_participants": 4})


@pytest.mark.parametrize(
    ("participants", "present", "size"), [(10, 25, 10), (10, 4, 4), (0.1, 25, 2), (0.1, 3, 1), (1.0, 7, 7)]
)
def test_a_cohort_is_a_count_or_a_share_of_those_present(participants, present, size):
    assert RunConfig(**LEAST, participants=participants).cohort_size(present) == size


def test_a_constant_schedule_keeps_the_rate():
    assert [RunConfig(**LEAST, lr=0.1).lr_of(n) for n in (1, 2, 3)] == [0.1, 0.1, 0.1]


def test_an_exponential_schedule_follows_torch():
    assert_follows_torch("exponential", lambda optimiser: lr_scheduler.ExponentialLR(optimiser, 0.9))


def test_a_cosine_schedule_follows_torch():
    assert_follows_torch("cosine", lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, 20))


def assert_follows_torch(name, make):
    config = RunConfig(fleet="f", rounds=20, lr=0.3, schedule=name, decay=0.9)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = make(optimiser)
    for number in range(1, 21):
        assert config.lr_of(number) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        scheduler.step()
