"""Which kind of round a run asks for: opened among the devices that are there, or taken up again."""

from __future__ import annotations

from msgspec.structs import replace

from edge_sdk.bundle import Bundle
from edge_sdk.tensors import Tensors
from edge_server.buffered import BufferedRound
from edge_server.chained import ChainedRound
from edge_server.descriptions import Descriptions
from edge_server.fleet import Fleet
from edge_server.mediators import chains
from edge_server.rounds import TrainingRound
from edge_server.rows import RoundRow, RunRow
from edge_server.selection import random_order, select
from edge_server.store import Store


def open_round(
    run: RunRow,
    bundle: Bundle,
    fleet: Fleet,
    known: Descriptions,
    weights: Tensors,
    *,
    attempt: int,
    now: float,
) -> TrainingRound:
    """An attempt at the round after the run's last."""
    config, present = run.config, fleet.present(now)
    if config.mode == "buffered":
        first = next_buffer(run, bundle, fleet, known, None, now=now)
        # The first of this server: one before it may have counted what comes once more.
        first.delivered = fleet.store.delivered(run.id, since=first.row.round - config.max_staleness)
        return first
    cohort = select(
        present,
        wanted=config.cohort_size(len(present)),
        over_selection=config.over_selection,
        groups=known.groups(),
        seed=config.seed,
        round_number=run.round + 1,
        attempt=attempt,
    )
    if config.chain:
        opened: TrainingRound = ChainedRound.over(
            run,
            bundle,
            chains(known.histograms_of(cohort.call()), longest=config.chain),
            weights=weights,
            publication=fleet.publication,
            histograms=known.histograms,
            attempt=attempt,
            now=now,
        )
    else:
        opened = TrainingRound.open(run, bundle, cohort, attempt=attempt, now=now)
    opened.augment = known.augmentation
    return opened


def next_buffer(
    run: RunRow,
    bundle: Bundle,
    fleet: Fleet,
    known: Descriptions,
    earlier: BufferedRound | None,
    *,
    now: float,
) -> BufferedRound:
    """The buffer after ``earlier``, whose devices go on."""
    seed, number = run.config.seed, run.round + 1
    order = random_order(fleet.present(now), seed=seed, round_number=number, attempt=0)
    opened = BufferedRound.after(run, bundle, order, model=fleet.model, earlier=earlier, now=now)
    opened.augment = known.augmentation
    return opened


def restore_round(
    run: RunRow,
    bundle: Bundle,
    fleet: Fleet,
    known: Descriptions,
    weights: Tensors,
    row: RoundRow,
    store: Store,
    *,
    now: float,
) -> TrainingRound:
    """The attempt of ``row``, without its accepted updates."""
    restored: TrainingRound
    if run.config.mode == "buffered":
        since = row.round - run.config.max_staleness
        restored = BufferedRound.restore(run, bundle, row, now=now)
        restored.delivered = store.delivered(run.id, since=since)
        restored.models[row.round] = fleet.model
        begun = {(d, n) for d, n in store.begun(run.id, since=since).items() if d in row.selected}
        restored.began_at = dict(begun - restored.delivered)
        for number in set(restored.began_at.values()) - {row.round}:
            old = store.rounds(run.id, number=number)[0]
            restored.models[number] = replace(fleet.model, hash=old.model_before, sources=("ask",))
            restored.gone.add(number)
    elif row.chains:
        restored = ChainedRound.restored(
            run,
            bundle,
            row,
            weights=weights,
            publication=fleet.publication,
            histograms=known.histograms,
            now=now,
        )
    else:
        restored = TrainingRound.restore(run, bundle, row, now=now)
    restored.augment = known.augmentation
    return restored
