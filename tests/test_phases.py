"""The table of the run's phases, and that the coordinator fires every event in it."""

import ast
import inspect
from itertools import product

import pytest

from edge_server import coordinator
from edge_server.phases import TRANSITIONS, Event, Phase, next_phase


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, Event)))
def test_a_phase_and_an_event_are_in_the_table_or_an_error(phase, event):
    if (phase, event) in TRANSITIONS:
        assert next_phase(phase, event) == TRANSITIONS[phase, event][0]
    else:
        with pytest.raises(ValueError, match=f"'{event.value}' cannot happen while {phase.value}"):
            next_phase(phase, event)


def test_every_transition_has_its_reason():
    assert all(reason for _, reason in TRANSITIONS.values())


def test_an_ended_run_does_not_go_on():
    assert not {phase for phase, _ in TRANSITIONS} & {Phase.FINISHED, Phase.STOPPED}


def test_every_phase_can_be_reached():
    reached = {Phase.GATHERING}
    for _ in Phase:
        reached |= {after for (before, _), (after, _) in TRANSITIONS.items() if before in reached}
    assert reached == set(Phase)


def test_a_run_can_be_interrupted_in_every_phase_that_is_not_an_end():
    interrupted = {phase for phase, event in TRANSITIONS if event == Event.INTERRUPTED}
    assert interrupted == set(Phase) - {Phase.FINISHED, Phase.STOPPED}


def test_the_coordinator_fires_every_event():
    tree = ast.parse(inspect.getsource(coordinator))
    fired = {
        node.attr
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "_fire"
        for argument in call.args
        for node in ast.walk(argument)
        if isinstance(node, ast.Attribute)
    }
    assert fired >= {event.name for event in Event}
