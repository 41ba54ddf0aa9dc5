"""One run of a fleet that faults befall, and what became of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from chaos.faults import Fault
from chaos.stage import Stage
from edge_server.rows import AcceptedResult, RoundRow
from edge_server.store import Store

HUNG = 900.0
"""Seconds after its last fault within which a run must have ended."""
RECOVERY = 20.0
"""Seconds that a fault waits until the fleet works again."""
PATIENCE = 3.0
"""Seconds that a fault waits for its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A kind of run.

    Attributes:
        synchronous: whether its bits do not depend on what is when, if every device of a round comes back.
    """

    name: str
    bundle: str
    rounds: int
    serve: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    chained: bool = False
    synchronous: bool = True


MODES = (
    Mode(
        name="plain",
        bundle="wide",
        rounds=24,
        serve=("--strategy", "fedavgm", "--momentum", "0.5", "--evaluation", "devices"),
        device=("--held-out", "0.2"),
    ),
    Mode(
        name="chained",
        bundle="small",
        rounds=40,
        serve=("--chain", "2", "--chunk-bytes", "1024"),
        device=("--share", "histogram", "--withhold-below", "0"),
        chained=True,
    ),
    Mode(name="int8+zstd", bundle="wide", rounds=24, serve=("--codec", "int8", "--compression", "zstd")),
    Mode(
        name="buffered",
        bundle="wide",
        rounds=40,
        serve=("--mode", "buffered", "--buffer", "3", "--strategy", "fedavgm", "--momentum", "0.5"),
        synchronous=False,
    ),
)


@dataclass(slots=True, kw_only=True)
class Trial:
    """What became of one run.

    Attributes:
        model: SHA-256 of its last model.
        same_bits: what ``edge-sdk replay`` says.
        undisturbed: every device of every round has come back, and nobody was replaced.
        lost: accepted updates that are not in the log, or not in the mean.
        twice: updates that count more than once.
        discarded: accepted updates that went with an aborted cohort.
        wrong: what else may not happen.
        other_bits: undisturbed, and not the bits of the run without faults.
    """

    faults: Counter[str]
    ends: Counter[str]
    model: str = ""
    rounds: int = 0
    same_bits: bool = False
    undisturbed: bool = False
    aborted: int = 0
    repeated: int = 0
    replaced: int = 0
    accepted: int = 0
    discarded: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    other_bits: bool = False
    seconds: float = 0.0


def run(
    mode: Mode,
    folder: Path,
    bundles: Path,
    *,
    devices: int,
    spare: int = 0,
    faults: Iterable[Fault] = (),
    most: int = 0,
    seed: int = 0,
    serve: tuple[str, ...] = (),
) -> Trial:
    """Run a fleet in ``folder`` to its end.

    Args:
        spare: devices that are in no cohort until somebody is to be replaced. With 0 the places of the lost
            are kept for them.
        faults: taken from the front until ``most`` have happened or the run is over.
        serve: further options of the server.
    """
    began = time.monotonic()
    least = devices - spare
    # A place is kept for as long as a trial lasts, or hardly longer than a device takes to start.
    patience = ("--deadline", "25", "--grace", "3") if spare else ("--deadline", "600", "--grace", "600")
    # A buffer that is full is enough, and a chain that has skipped one device.
    least_in = 1 if not mode.synchronous else least - 1 if mode.chained else least
    options = ["--rounds", str(mode.rounds), "--participants", str(least), "--min-devices", str(least)]
    options += ["--min-participants", str(least_in), "--join-timeout", "120", *patience]
    if "--chunk-bytes" not in mode.serve:
        options += ["--chunk-bytes", "4096"]
    if "--evaluation" not in mode.serve:
        options += ["--evaluation", "none"]
    with Stage(
        folder, bundles / f"{mode.bundle}.edge", devices, [*options, *mode.serve, *serve], mode.device, seed
    ) as stage:
        for fault in faults:
            if sum(stage.done.values()) >= most or stage.server.ended:
                break
            if fault.calm and stage.wait(RECOVERY, upon="receipt"):
                break
            if stage.wait(fault.after):
                break
            if fault.upon and stage.wait(PATIENCE, upon=fault.upon, hold=fault.before):
                break
            stage.befall(fault)
        stage.heal()
        ended = stage.wait(HUNG)
        trial = Trial(faults=stage.done, ends=stage.ends)
        if not ended:
            trial.wrong.append(f"the run has not ended within {HUNG:.0f} s of its last fault")
        # The devices are told, and go; those that came too late are not waited for.
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not all(d.ended for d in stage.fleet.values()):
            for service in stage.fleet.values():
                service.look(time.monotonic())
            time.sleep(0.05)
    trial.seconds = time.monotonic() - began
    _judge(trial, stage, mode, devices=devices, spare=spare)
    return trial


def _judge(trial: Trial, stage: Stage, mode: Mode, *, devices: int, spare: int) -> None:
    """Hold what the devices were told against the server's log, and the log against its models."""
    for log in sorted(stage.folder.glob("*.log")):
        if "Traceback" in log.read_text(errors="replace"):
            trial.wrong.append(f"a traceback in {log}")
    with closing(Store(stage.folder / "server", exclusive=False)) as store:
        (row,) = store.runs()
        rows = [each for each in store.rounds(row.id) if each.kind == "train"]
        counted = [(each, result) for each in rows if _counts(each) for result in store.results(each)]
        discarded = [
            (each, result) for each in rows if each.status == "repeated" for result in store.results(each)
        ]
        _find_lost(trial, stage, store, counted, discarded)
    trial.model, trial.rounds = row.model, row.round
    if not row.ended or row.round != mode.rounds:
        trial.wrong.append(f"the run has ended after {row.round} of {mode.rounds} rounds")
    trial.aborted = sum(each.status == "repeated" for each in rows)
    trial.repeated = len({each.round for each in rows if each.status == "repeated"})
    # A buffer has no cohort of its own.
    trial.replaced = sum(max(len(each.selected) - each.wanted, 0) for each in rows if mode.synchronous)
    trial.discarded = len(discarded)
    _find_twice(trial, rows, counted)
    whole = all(
        len({result.device for of, result in counted if of == each}) == devices
        for each in rows
        if _counts(each)
    )
    trial.undisturbed = mode.synchronous and whole and not trial.aborted
    if mode.synchronous and not spare and not trial.undisturbed:
        trial.wrong.append("the place of a device was not kept for it")
    replay = subprocess.run(
        [Path(sys.executable).with_name("edge-sdk"), "replay", "--work-dir", stage.folder / "server"],
        capture_output=True,
        text=True,
    )
    trial.same_bits = replay.returncode == 0 and len(replay.stdout.splitlines()) == mode.rounds
    if not trial.same_bits:
        trial.wrong.append(f"replay: {replay.stdout[-300:]}{replay.stderr[-300:]}")


def _counts(row: RoundRow) -> bool:
    return row.status == "aggregated"


def _find_lost(
    trial: Trial,
    stage: Stage,
    store: Store,
    counted: list[tuple[RoundRow, AcceptedResult]],
    discarded: list[tuple[RoundRow, AcceptedResult]],
) -> None:
    told = {
        (device, receipt)
        for direction, device, receipt in stage.receipts
        if receipt.kind == "train" and receipt.accepted
    }
    trial.accepted = len(told)
    in_means = {(result.device, result.hash, result.hop) for _, result in counted}
    in_ruins = {(result.device, result.hash, result.hop) for _, result in discarded}
    for device, receipt in told:
        mine = (device, receipt.blob, receipt.hop)
        name = f"{device}'s update {str(receipt.blob)[:12]} of round {receipt.round}.{receipt.attempt}"
        if not any((r.device, r.hash, r.hop) == mine for r in store.results(receipt)):
            trial.lost.append(f"{name} was accepted and is not in the log")
        elif mine not in in_means | in_ruins:
            trial.lost.append(f"{name} was accepted and is in no mean")


def _find_twice(trial: Trial, rows: list[RoundRow], counted: list[tuple[RoundRow, AcceptedResult]]) -> None:
    for number, times in Counter(row.round for row in rows if _counts(row)).items():
        if times > 1:
            trial.twice.append(f"round {number} was aggregated {times} times")
    keys = Counter((result.round, result.device, result.hop) for _, result in counted)
    for (number, device, hop), times in keys.items():
        if times > 1:
            trial.twice.append(f"{device}'s update of round {number}, turn {hop}, counts {times} times")
    for row in rows:
        if not _counts(row) or row.figures is None:
            continue
        # A device of a chain counts once, with its first turn; in a buffer it may have begun twice.
        mine = [result for of, result in counted if of == row]
        once = {(result.device, result.round): result.examples for result in reversed(mine)}
        said, logged = row.figures, (len({result.device for result in mine}), sum(once.values()))
        if (said["participants"], said["examples"]) != logged:
            trial.twice.append(
                f"round {row.round} says {said['participants']} devices, {said['examples']} "
                f"examples; its log {logged[0]}, {logged[1]}"
            )
        if len(mine) > row.wanted:
            trial.wrong.append(f"round {row.round} has {len(mine)} updates for {row.wanted} places")
