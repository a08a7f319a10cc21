"""Runs the exporter, which measures itself: `python -m tests.support.measured`.

On SIGUSR1 it writes the file `MEASUREMENTS`: the number of asyncio tasks, the number of objects
that the garbage collector knows, and the longest wait of the event loop since the last SIGUSR1.
Series of nodes without VMs are kept for `SERIES_KEPT_FOR` seconds. Both names are environment
variables.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from exporter.__main__ import main
from exporter.cli.lean_start import lean_imports


with lean_imports():
    from exporter import app, counters

BEAT = 0.02
MEASUREMENTS = Path(os.environ["MEASUREMENTS"])
_run = app.run


class LoopWaits:
    """The longest time for which a callback of the event loop had to wait."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def measure(self) -> None:
        """Sleep again and again, and note by how much longer than `BEAT` it took."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(BEAT)
            self.longest = max(self.longest, loop.time() - began - BEAT)

    def report(self) -> None:
        """Write the measurements, and begin anew."""
        gc.collect()
        measured = {
            "tasks": len(asyncio.all_tasks()),
            "objects": len(gc.get_objects()),
            "longest_wait": self.longest,
        }
        unfinished = MEASUREMENTS.with_suffix(".new")
        unfinished.write_text(json.dumps(measured))
        unfinished.rename(MEASUREMENTS)
        self.longest = 0.0


async def run(*arguments: Any, **options: Any) -> None:
    """`app.run`, measured."""
    waits = LoopWaits()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, waits.report)
    measuring = asyncio.create_task(waits.measure())
    try:
        await _run(*arguments, **options)
    finally:
        measuring.cancel()


if __name__ == "__main__":
    counters.SERIES_KEPT_FOR = counters.TARGET_FAILED_WITHIN = float(os.environ["SERIES_KEPT_FOR"])
    app.FORGET_EVERY = 1.0
    app.run = run
    sys.exit(main())
