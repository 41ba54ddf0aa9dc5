import numpy as np
import pytest
from quadrants import quadrants

from edge_sdk.description import Sharing, check_description, describe, description_specs, refuse_unshared
from edge_sdk.errors import DataError, EdgeError, TensorError
from edge_sdk.protocol.messages import Ref, Task
from edge_sdk.tensors import encode

DATA = quadrants(40)
EVERY = np.arange(40)


def told(paper, sharing, wants=("histogram",), trained=(DATA, EVERY)):
    return describe(
        DATA,
        EVERY,
        paper.manifest,
        wants,
        sharing,
        trained=lambda: trained,
        open_describer=lambda: pytest.fail("no image need be looked at"),
    )


def task(**fields):
    ref = Ref(hash="0" * 64, size=1, chunk=1024)
    key = {"run": "a" * 32, "round": 0, "attempt": 0, "nonce": "b" * 16, "deadline": 1}
    return Task(**key, bundle=ref, model=ref, **fields)


def test_nothing_is_shared_by_default(paper):
    assert told(paper, Sharing()) == {}


def test_the_histogram_counts_the_examples_that_are_trained_on(paper):
    counts = told(paper, Sharing(histogram=True, withhold_below=0))["histogram"]
    np.testing.assert_array_equal(counts, np.bincount(DATA.labels, minlength=4))
    assert counts.dtype == np.int64


def test_copies_do_not_lift_a_class_over_the_bound_below_which_it_is_withheld(paper):
    own = np.bincount(DATA.labels, minlength=4)
    bound = int(own.min()) + 1
    twice = np.concatenate([EVERY, EVERY])
    counts = told(paper, Sharing(histogram=True, withhold_below=bound), trained=(DATA, twice))["histogram"]
    np.testing.assert_array_equal(counts, np.where(own >= bound, 2 * own, 0))


def test_a_bound_below_nothing_is_refused():
    with pytest.raises(DataError, match="withhold_below is -1"):
        Sharing(withhold_below=-1)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"kind": "describe", "wants": ("histogram", "descriptor")}, "histogram or descriptor"),
        ({"kind": "statistics"}, "statistics"),
    ],
)
def test_a_task_of_which_nothing_is_shared_is_refused_by_name(fields, missing):
    with pytest.raises(EdgeError, match=f"does not share its {missing}"):
        refuse_unshared(task(**fields), Sharing(feature=True))


def test_a_task_of_which_something_is_shared_is_done_and_training_always_is():
    refuse_unshared(task(kind="describe", wants=("histogram", "feature")), Sharing(feature=True))
    refuse_unshared(task(kind="train"), Sharing())


def test_a_bundle_without_a_describe_program_has_a_histogram_to_tell_alone(paper):
    specs = description_specs(("histogram", "descriptor", "feature"), paper.manifest)
    assert [(spec.name, spec.shape) for spec in specs] == [("histogram", (4,))]


COUNTS = np.array([1, 0, 2, 3], np.int64)


def test_a_description_is_read_back(paper):
    read = check_description(encode({"histogram": COUNTS}), ("histogram",), paper.manifest, max_examples=6)
    np.testing.assert_array_equal(read["histogram"], COUNTS)


@pytest.mark.parametrize("fact", ["descriptor", "feature"])
def test_a_descriptor_that_could_not_be_compared_is_refused(describing, fact):
    (spec,) = description_specs((fact,), describing.manifest)
    rogue = np.full(spec.shape, (1 << 53) + 2, spec.dtype)
    with pytest.raises(TensorError, match="beyond 2"):
        check_description(encode({fact: rogue}), (fact,), describing.manifest, max_examples=100)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"not tensors", "not a valid safetensors file"),
        (encode({}), "is empty"),
        (encode({"histogram": -COUNTS}), "negative count"),
        (encode({"histogram": COUNTS}), "claims 6 examples, over the limit of 5"),
        (encode({"histogram": np.full(4, 1 << 62)}), "over the limit"),
        (encode({"histogram": COUNTS[:3]}), "expected int64"),
        (encode({"histogram": COUNTS.astype(np.float64)}), "expected int64"),
        (encode({"histogram": COUNTS, "secret": COUNTS}), "not part of this model"),
    ],
)
def test_a_description_that_was_not_asked_for_or_cannot_be_true_is_refused(paper, data, complaint):
    with pytest.raises(TensorError, match=complaint):
        check_description(data, ("histogram",), paper.manifest, max_examples=5)
