"""The short form of ``benchmarks/chaos.py``: two runs of real processes that faults of every kind befall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPTIONS = ("--short", "--faults", "28", "--devices", "4", "--pause", "0.3", "--seed", "1")


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    """What the benchmark writes, and prints."""
    out = tmp_path_factory.mktemp("chaos") / "chaos.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "chaos.py", *OPTIONS, "--json", out],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_faults_of_many_kinds_have_happened(chaos):
    document, said = chaos
    # How many fit into runs of a given length depends on the machine.
    assert document["figures"]["faults"] >= 10, said
    assert len(document["by_kind"]) >= 6, said


def test_no_update_is_lost_and_none_counts_twice(chaos):
    document, said = chaos
    assert (document["figures"]["lost"], document["figures"]["twice"]) == (0, 0), said


def test_the_replay_has_the_same_bits(chaos):
    document, said = chaos
    assert document["figures"]["replay_bits"] == 1, said


def test_a_run_whose_devices_all_come_back_has_the_bits_of_one_without_faults(chaos):
    document, said = chaos
    assert document["figures"]["undisturbed_runs"] == 1, said
    assert document["figures"]["undisturbed_bits"] == 1, said
