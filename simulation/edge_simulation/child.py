"""Processes that end with the one that started them, even where that is killed.

``python -c`` with :func:`command` in place of ``python -m``, which would put the current folder, and any
``queue.py`` in it, before the standard library. Imports nothing but that library.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable


def command(python: str, module: str, arguments: list[str]) -> list[str]:
    """What starts ``main(arguments)`` of ``module`` as a child; give it a pipe as standard input."""
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from importlib import import_module; "
        f"from edge_simulation.child import run; run(import_module({module!r}).main)"
    )
    return [python, "-c", code, *arguments]


def run(main: Callable[[list[str]], int]) -> None:
    """Run ``main`` until it returns, standard input ends, or the parent is gone."""
    parent = os.getppid()

    def end_with_parent() -> None:
        # A forked child of a killed parent would keep the pipe open, hence the look at the parent too.
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], 0.2)
            if readable and not os.read(0, 4096):
                break
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
