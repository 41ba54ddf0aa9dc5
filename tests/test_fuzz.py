"""Malformed input for every decoder, a little of it: benchmarks/fuzz.py gives them a million."""

import pytest
from hostile.decoders import decoders
from hostile.mutations import mutated
from hostile.watch import watch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore")

DECODERS = decoders()
SOME = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def every(chosen):
    return pytest.mark.parametrize("decoder", chosen, ids=lambda decoder: decoder.name)


@every(DECODERS)
def test_what_is_honest_is_read_or_refused_as_documented(decoder):
    outcomes = [watch(decoder, seed) for seed in decoder.seeds]
    assert any(outcome.taken for outcome in outcomes)
    assert not [outcome for outcome in outcomes if outcome.defect]


@every(DECODERS)
@given(st.randoms(use_true_random=False), st.data())
@SOME
def test_mutated_bytes_are_refused_as_documented_at_once_and_in_little_memory(decoder, draw, data):
    seeds = st.sampled_from(decoder.seeds)
    malformed = mutated(draw, data.draw(seeds), data.draw(seeds))
    assert not watch(decoder, malformed).defect


@every([decoder for decoder in DECODERS if decoder.inside])
@given(st.randoms(use_true_random=False), st.data())
@SOME
def test_what_is_malformed_in_a_sound_container_is_refused_as_documented(decoder, draw, data):
    malformed = draw.choice(decoder.inside)(draw, data.draw(st.sampled_from(decoder.seeds)))
    assert not watch(decoder, malformed).defect


@every(DECODERS)
@given(data=st.binary(max_size=300))
@SOME
def test_random_bytes_are_refused_as_documented(decoder, data):
    assert not watch(decoder, data).defect
