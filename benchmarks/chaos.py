"""Fleets of real processes that everything befalls: what is lost, what counts twice, whose bits differ.

    python benchmarks/chaos.py --faults 200 --seed 1 [--devices N] [--json PATH]

A real mosquitto, ``edge-sdk serve`` and ``edge-sdk device``, and a proxy between them. At random instants
server, broker or a device is killed or stands still, links are cut, in the middle of a chunk too, or stall,
messages are delayed, doubled and reordered. What ends with an error is started again after half a second, as
systemd would; nothing else helps a run along. Runs follow one another until there were as many faults as
wanted, in turn of every mode (``chaos/trial.py``), and each mode in two ways:

- every device is in every cohort, and its place is kept for it: if all come back, the run must end with the
  bits of the same run without faults;
- two devices are spare and replace the lost, the grace is short, and now and then all devices are lost, so
  that a round is repeated.

Afterwards every receipt that the server has sent is held against its log, the log against the models by
``edge-sdk replay``. The plan of faults is drawn by the seed; which message they meet is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from chaos.faults import plan
from chaos.material import shares, write_bundles
from chaos.trial import MODES, Mode, Trial, run
from rich.console import Console
from rich.table import Table

SPARE = 2
LOST = 7.0
"""Seconds for which a whole fleet is lost: longer than the grace and the start of a device."""


def main() -> int:
    options = _options()
    # What has been started is ended then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="edge-chaos-") as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        write_bundles(folder)
        trials = (_short if options.short else _trials)(options, folder)
    seconds = time.perf_counter() - began
    figures = _figures(trials)
    _print(trials, figures)
    if options.json:
        budget = f"{options.faults} faults, seed {options.seed}, {options.devices} devices, {seconds:.0f} s"
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        document = {
            "figures": figures,
            "by_kind": dict(sorted(_faults(trials).items())),
            "budget": budget,
            "machine": machine,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    every = trials.values()
    return int(any(trial.lost or trial.twice or trial.wrong or trial.other_bits for trial in every))


def _trials(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], Trial]:
    """By mode, way and number, what became of each run."""
    modes = [mode for mode in MODES if options.only is None or mode.name == options.only]
    quiet: dict[str, Trial] = {}
    trials: dict[tuple[str, str, int], Trial] = {}
    while (left := options.faults - sum(_faults(trials).values())) > 0:
        number = len(trials)
        mode, spare = modes[number // 2 % len(modes)], SPARE * (number % 2)
        if mode.synchronous and mode.name not in quiet:
            quiet[mode.name] = _run(options, folder, mode)
        trial = _run(options, folder, mode, number=number, spare=spare, most=min(left, options.each))
        trials[mode.name, "spare" if spare else "whole", number] = trial
        if not spare and mode.name in quiet:
            _compare(trial, quiet[mode.name])
    return trials


def _short(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str, int], Trial]:
    """One mode with a small model, both ways and without faults, all three side by side."""
    mode = replace(MODES[0], bundle="small", rounds=20, serve=(*MODES[0].serve, "--epochs", "50"))
    most = -(-options.faults // 2)

    def run_way(number: int) -> Trial:
        if number == 2:
            return _run(options, folder, mode)
        return _run(options, folder, mode, number=number, spare=SPARE * number, most=most)

    with ThreadPoolExecutor(3) as pool:
        whole, spare, quiet = pool.map(run_way, range(3))
    _compare(whole, quiet)
    return {(mode.name, "whole", 0): whole, (mode.name, "spare", 1): spare}


def _run(
    options: argparse.Namespace, folder: Path, mode: Mode, *, number: int = 0, spare: int = 0, most: int = 0
) -> Trial:
    """A run and its line; without faults if it may have none."""
    way = "quiet" if not most else "spare" if spare else "whole"
    lost = LOST if spare else 0.0
    devices = sorted(shares(options.devices))
    trial = run(
        mode,
        folder / (f"{number}-{mode.name}-{way}" if most else f"{mode.name}-{way}"),
        folder,
        devices=options.devices,
        spare=spare,
        faults=plan(devices, seed=[options.seed, number], pause=options.pause, lost=lost),
        most=most,
        seed=number,
    )
    _say(options, mode, way, trial)
    return trial


def _compare(trial: Trial, quiet: Trial) -> None:
    """Hold a run whose devices have all come back against the one without faults."""
    if trial.undisturbed and trial.model != quiet.model:
        trial.other_bits = True
        print(f"  VIOLATED: all devices came back, and the bits differ from {quiet.model[:12]}", flush=True)


def _faults(trials: dict[tuple[str, str, int], Trial]) -> Counter[str]:
    return sum((trial.faults for trial in trials.values()), Counter())


def _figures(trials: dict[tuple[str, str, int], Trial]) -> dict[str, int]:
    every = list(trials.values())
    undisturbed = [trial for (_, way, _), trial in trials.items() if way == "whole" and trial.undisturbed]
    return {
        "runs": len(every),
        "faults": sum(_faults(trials).values()),
        "aborted": sum(trial.aborted for trial in every),
        "replaced": sum(trial.replaced for trial in every),
        "lost": sum(len(trial.lost) for trial in every),
        "twice": sum(len(trial.twice) for trial in every),
        "replay_bits": int(all(trial.same_bits for trial in every)),
        "undisturbed_runs": len(undisturbed),
        "undisturbed_bits": int(bool(undisturbed) and not any(trial.other_bits for trial in undisturbed)),
    }


def _say(options: argparse.Namespace, mode: Mode, way: str, trial: Trial) -> None:
    print(
        f"{mode.name:10s} {way:5s} {sum(trial.faults.values()):3d} faults, {trial.rounds} rounds, "
        f"{trial.accepted} updates accepted, {trial.discarded} of them with {trial.aborted} aborted cohorts "
        f"({trial.repeated} rounds repeated), {trial.replaced} devices replaced, {len(trial.lost)} lost, "
        f"{len(trial.twice)} twice, replay {'same bits' if trial.same_bits else 'DIFFERS'}, "
        f"{'all came back, ' if trial.undisturbed else ''}{trial.model[:12]}, {trial.seconds:.0f} s",
        flush=True,
    )
    for what in (*trial.lost, *trial.twice, *trial.wrong):
        print(f"  VIOLATED: {what}", flush=True)
    if options.verbose:
        for words, times in trial.ends.most_common():
            print(f"  {times} x {words}", flush=True)


def _print(trials: dict[tuple[str, str, int], Trial], figures: dict[str, int]) -> None:
    console = Console()
    kinds = Table("fault", "times", title="Faults")
    for kind, times in sorted(_faults(trials).items()):
        kinds.add_row(kind, str(times))
    console.print(kinds)
    ends: Counter[str] = sum((trial.ends for trial in trials.values()), Counter())
    if ends:
        last = Table("times", "last words of what was started again")
        for words, times in ends.most_common():
            last.add_row(str(times), words)
        console.print(last)
    console.print(figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="until so many have happened")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--devices", type=int, default=6, metavar="D")
    parser.add_argument("--each", type=int, default=30, metavar="N", help="most faults in one run")
    parser.add_argument("--pause", type=float, default=0.5, metavar="S", help="mean seconds between faults")
    parser.add_argument("--only", choices=[mode.name for mode in MODES], help="one mode in place of all")
    parser.add_argument("--short", action="store_true", help="a small model and one mode, for tests")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep logs and stores here")
    parser.add_argument("--verbose", action="store_true", help="last words of processes after each run")
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
