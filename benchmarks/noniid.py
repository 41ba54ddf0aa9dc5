"""What each of the four papers buys on skewed data: accuracy for the same local steps and the same bytes.

    python benchmarks/noniid.py [--quick | --paper] [--only PATTERN] [--data-dir DIR] [--weights FILE]

100 devices, ten in a round (FedAvgM against FedAvg with five, too), one local epoch, batches of 50. Every run
of a data set may use the same number of local steps of all its devices together; a chain's devices do one
epoch each, as they would side by side, so that as many bytes go up and down. Only augmentation makes devices
train on more, for which such a run has fewer rounds. Each strategy has its own best learning rate of one
grid, searched uphill on the test accuracy of one seed, as the papers tune theirs; where there are three
seeds, a rate that fails with another one is given up for the next best. All runs are done by the engine that
gives the bits of a run over MQTT.

The model is the smallest that makes this a matter of hours (``noniid/models.py``). Every finished run is a
line in ``--cache``; the same command goes on where it was stopped, and ``--table`` prints what is there.
``--quick`` takes part of the cells on Fashion-MNIST, half of the steps or less, and no search. ``--paper``
does the papers' own settings, for who has the machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from noniid.cells import Result
from noniid.models import export, load
from noniid.paper import paper_runs
from noniid.plan import Plan, cells, chosen, key_of, read_results, work
from noniid.settings import DATA, FULL, QUICK, Run
from noniid.table import details, figures, markdown


def main() -> None:
    options = _options()
    options.cache.mkdir(parents=True, exist_ok=True)
    results = read_results(options.cache)
    began = time.perf_counter()

    def on_result(result: Result) -> None:
        note = f" ({result.failed})" if result.failed else ""
        print(
            f"{time.perf_counter() - began:6.0f} s  {result.run.name:32s} lr {result.run.settings['lr']:<7g} "
            f"seed {result.run.seed}: {result.accuracy:5.1f} %, calibrated {result.calibrated:5.1f} %, "
            f"{result.rounds} rounds, {result.seconds:.0f} s{note}",
            flush=True,
        )

    if options.paper:
        runs = [run for run in paper_runs() if options.only is None or options.only in run.name]
        _prepare(options, runs)
        work(
            lambda: [run for run in runs if key_of(run) not in results],
            results,
            cache=options.cache,
            data_dir=options.data_dir,
            workers=options.workers,
            on_result=on_result,
        )
        return
    budget = QUICK if options.quick else FULL
    every = cells(budget.steps, quick=options.quick)
    plan = Plan(every, budget, results)
    wanted = Plan(chosen(every, options.only), budget, results)
    if not options.table:
        _prepare(options, [cell.run(0.1, 0, budget) for cell in wanted.cells])
        work(
            wanted.wanted,
            results,
            cache=options.cache,
            data_dir=options.data_dir,
            workers=options.workers,
            on_result=on_result,
        )
    found = figures(plan)
    print(_budget(plan), markdown(plan, found), sep="\n\n")
    if options.json:
        document = {
            "figures": found,
            "budget": _budget(plan),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, onnxruntime {version('onnxruntime')}",
            "cells": details(plan),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _prepare(options: argparse.Namespace, runs: list[Run]) -> None:
    """Fail now, not after hours, if data is missing; and export what is not exported yet."""
    for data in sorted({run.data for run in runs}):
        load(data, options.data_dir)
    wanted = {(run.model, run.data) for run in runs}
    wanted |= {("describer", run.data) for run in runs if run.settings.get("selection") == "grouped"}
    for model, data in sorted(wanted):
        export(options.cache, model, data, options.weights)


def _budget(plan: Plan) -> str:
    budget = plan.budget
    steps = ", ".join(
        f"{data} {budget.steps[data]:,} ({budget.steps_of_five[data]:,} with five devices a round)"
        for data in DATA
        if data in budget.steps
    )
    open_ = sum(not plan.is_done(cell) for cell in plan.cells)
    partial = f"; {open_} of {len(plan.cells)} cells are not finished (…)" if open_ else ""
    return (
        f"Local steps of {budget.batch} images in every run: {steps}; {budget.seeds} seeds in headline "
        f"cells{partial}."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="ten minutes on two cores")
    size.add_argument("--paper", action="store_true", help="the papers' own settings: days to weeks")
    parser.add_argument("--only", metavar="PATTERN", help="cells by name, as cifar10.alpha0*")
    parser.add_argument("--table", action="store_true", help="print what the cache has and do nothing more")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10's binary files are")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="of MobileNetV2, for fldg_l and full")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path("noniid-cache"))
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
