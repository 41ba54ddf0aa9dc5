"""What server momentum buys on the demo's fleet: FedAvg against FedAvgM, over several seeds.

Each seed is one whole demo: real device processes, a real broker, the digits split anew.

    python benchmarks/demo.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from edge_simulation.demo import Demo, run_demo


def main() -> None:
    """Run the demos, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed in place of five")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    seeds = range(1 if options.quick else 5)
    began = time.perf_counter()
    runs = [final_accuracies(seed) for seed in seeds]
    seconds = (time.perf_counter() - began) / len(runs)
    figures = {f"accuracy.{name}": round(float(np.mean([run[name] for run in runs])), 2) for name in runs[0]}
    figures["gain"] = round(figures["accuracy.fedavgm"] - figures["accuracy.fedavg"], 2)
    figures["gain.worst"] = round(min(run["fedavgm"] - run["fedavg"] for run in runs), 2)
    figures["seconds"] = round(seconds, 1)

    table = Table("seed", *runs[0], title="Final accuracy on held-out digits, %")
    for seed, run in zip(seeds, runs, strict=True):
        table.add_row(str(seed), *(f"{accuracy:.2f}" for accuracy in run.values()))
    Console().print(table)
    Console().print(figures)
    if options.json:
        budget = (
            f"{len(runs)} seeds, {Demo().devices} devices, {Demo().rounds} rounds, 1 local epoch, batch 8"
        )
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        document = {"figures": figures, "budget": budget, "machine": machine}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def final_accuracies(seed: int) -> dict[str, float]:
    """Final accuracies in per cent, by strategy, of one demo."""
    with tempfile.TemporaryDirectory() as folder:
        run_demo(Demo(seed=seed, out=Path(folder)), Console(quiet=True))
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {name: 100 * run["final_accuracy"] for name, run in summary["runs"].items()}


if __name__ == "__main__":
    main()
