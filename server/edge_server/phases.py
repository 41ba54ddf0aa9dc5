"""The run as a state machine: one table of (phase, event) → phase, each with its reason."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """What a run is doing."""

    GATHERING = "gathering"
    DESCRIBING = "describing"
    TRAINING = "training"
    EVALUATING = "evaluating"
    CALIBRATING = "calibrating"
    FINISHED = "finished"
    STOPPED = "stopped"


class Event(str, Enum):
    """What can happen to a run."""

    ENOUGH_DEVICES = "enough devices"
    UNDESCRIBED = "undescribed devices"
    DESCRIBED = "described"
    TOO_FEW_AT_START = "too few at the start"
    PATIENCE_OUT = "patience is out"
    COHORT_COMPLETE = "cohort complete"
    LAST_FLUSHED = "last buffer complete"
    COHORT_SHORT = "cohort short"
    EVALUATED = "evaluated"
    LAST_EVALUATED = "last model evaluated"
    BIASED = "last round evaluated, classifier to be calibrated"
    CALIBRATED = "calibrated"
    NOT_CALIBRATED = "not calibrated"
    INTERRUPTED = "interrupted"


TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, str]] = {
    (Phase.GATHERING, Event.ENOUGH_DEVICES): (Phase.TRAINING, "a cohort is asked to train"),
    (Phase.GATHERING, Event.UNDESCRIBED): (Phase.DESCRIBING, "selection must know the devices' data"),
    (Phase.GATHERING, Event.TOO_FEW_AT_START): (Phase.STOPPED, "a run that cannot start says so at once"),
    (Phase.GATHERING, Event.PATIENCE_OUT): (Phase.STOPPED, "no wait is for ever; the run can be resumed"),
    (Phase.TRAINING, Event.PATIENCE_OUT): (Phase.STOPPED, "a buffer that nobody fills waits no longer"),
    (Phase.DESCRIBING, Event.DESCRIBED): (Phase.GATHERING, "who says nothing is selected all the same"),
    (Phase.TRAINING, Event.COHORT_COMPLETE): (Phase.EVALUATING, "the mean is applied in one transaction"),
    (Phase.TRAINING, Event.LAST_FLUSHED): (Phase.EVALUATING, "the buffers before it may still be evaluated"),
    (Phase.TRAINING, Event.COHORT_SHORT): (Phase.GATHERING, "too few updates: repeated, never aggregated"),
    (Phase.EVALUATING, Event.EVALUATED): (Phase.GATHERING, "the next round"),
    (Phase.EVALUATING, Event.BIASED): (Phase.CALIBRATING, "statistics are of the last model's features"),
    (Phase.EVALUATING, Event.LAST_EVALUATED): (Phase.FINISHED, "all rounds are done"),
    (Phase.CALIBRATING, Event.CALIBRATED): (Phase.EVALUATING, "the new classifier has figures of its own"),
    (Phase.CALIBRATING, Event.NOT_CALIBRATED): (Phase.FINISHED, "no statistics: the last model stands"),
    (Phase.GATHERING, Event.INTERRUPTED): (Phase.STOPPED, "what is durable is kept"),
    (Phase.DESCRIBING, Event.INTERRUPTED): (Phase.STOPPED, "what was said is kept"),
    (Phase.TRAINING, Event.INTERRUPTED): (
        Phase.STOPPED,
        "accepted updates are kept; it goes on later",
    ),
    (Phase.EVALUATING, Event.INTERRUPTED): (Phase.STOPPED, "the model is kept; its figures are missing"),
    (Phase.CALIBRATING, Event.INTERRUPTED): (Phase.STOPPED, "accepted statistics are kept"),
}


def next_phase(phase: Phase, event: Event) -> Phase:
    """The phase after ``event``; ValueError if the table has none, which is a defect of the caller."""
    try:
        return TRANSITIONS[phase, event][0]
    except KeyError:
        raise ValueError(f"{event.value!r} cannot happen while {phase.value}") from None
