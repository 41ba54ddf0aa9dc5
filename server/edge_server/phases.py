"""The run as a state machine: one table of (phase, event) → phase, each with its reason."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """What a run is doing."""

    GATHERING = "gathering"
    TRAINING = "training"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    STOPPED = "stopped"


class Event(str, Enum):
    """What can happen to a run."""

    ENOUGH_DEVICES = "enough devices"
    TOO_FEW_AT_START = "too few at the start"
    PATIENCE_OUT = "patience is out"
    COHORT_COMPLETE = "cohort complete"
    COHORT_SHORT = "cohort short"
    EVALUATED = "evaluated"
    LAST_EVALUATED = "last round evaluated"
    INTERRUPTED = "interrupted"


TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, str]] = {
    (Phase.GATHERING, Event.ENOUGH_DEVICES): (Phase.TRAINING, "a cohort is asked to train"),
    (Phase.GATHERING, Event.TOO_FEW_AT_START): (Phase.STOPPED, "a run that cannot start says so at once"),
    (Phase.GATHERING, Event.PATIENCE_OUT): (Phase.STOPPED, "no wait is for ever; the run can be resumed"),
    (Phase.TRAINING, Event.COHORT_COMPLETE): (Phase.EVALUATING, "the mean is applied in one transaction"),
    (Phase.TRAINING, Event.COHORT_SHORT): (Phase.GATHERING, "too few updates: repeated, never aggregated"),
    (Phase.EVALUATING, Event.EVALUATED): (Phase.GATHERING, "the next round"),
    (Phase.EVALUATING, Event.LAST_EVALUATED): (Phase.FINISHED, "all rounds are done"),
    (Phase.GATHERING, Event.INTERRUPTED): (Phase.STOPPED, "what is durable is kept"),
    (Phase.TRAINING, Event.INTERRUPTED): (
        Phase.STOPPED,
        "accepted updates are kept; it goes on later",
    ),
    (Phase.EVALUATING, Event.INTERRUPTED): (Phase.STOPPED, "the model is kept; its figures are missing"),
}


def next_phase(phase: Phase, event: Event) -> Phase:
    """The phase after ``event``; ValueError if the table has none, which is a defect of the caller."""
    try:
        return TRANSITIONS[phase, event][0]
    except KeyError:
        raise ValueError(f"{event.value!r} cannot happen while {phase.value}") from None
