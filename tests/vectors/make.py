"""Write the golden vectors anew: ``cd tests && python -m vectors.make``."""

from __future__ import annotations

from pathlib import Path

from vectors.of_messages import messages
from vectors.of_statistics import told
from vectors.of_sums import sums
from vectors.of_transfers import topics, transfers
from vectors.of_updates import updates

FOLDER = Path(__file__).parent
MAKERS = {
    "messages.json": messages,
    "topics.json": topics,
    "transfers.json": transfers,
    "updates.json": updates,
    "sums.json": sums,
    "statistics.json": told,
}

if __name__ == "__main__":
    for name, make in MAKERS.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
