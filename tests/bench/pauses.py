"""Runs the exporter, and logs what blocks its event loop: `python -m tests.bench.pauses`.

A pause is a callback of the event loop that took longer than `FLOOR` seconds. During each callback
a second thread notes the running function. A pause is logged with its length, its CPU time, the
time of the garbage collector, and the function of the exporter that was seen most often. If the CPU
time is much shorter than the pause, the machine ran something else.
"""

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import structlog

from exporter.__main__ import main


FLOOR = 0.004
_PACKAGE = str(Path(main.__code__.co_filename).parent)
_run = asyncio.Handle._run  # noqa: SLF001 (there is no other place to time a callback)


class Recorder:
    """Times each callback of the event loop, and counts the functions that were seen in it."""

    def __init__(self) -> None:
        self.began = 0.0
        self.collecting = 0.0
        self.collected = 0.0
        self.seen: Counter[str] = Counter()
        self._thread = threading.get_ident()

    def run(self, handle: asyncio.Handle) -> None:
        """Run a callback of the event loop, and log it if it took long."""
        cpu = time.thread_time()
        self.collected = 0.0
        self.began = began = time.perf_counter()
        _run(handle)
        took = time.perf_counter() - began
        self.began = 0.0
        if took < FLOOR:
            return
        (function, _), *_ = self.seen.most_common(1) or [("not seen", 0)]
        self.seen.clear()
        structlog.get_logger().warning(
            "pause",
            seconds=round(took, 4),
            cpu=round(time.thread_time() - cpu, 4),
            collected=round(self.collected, 4),
            function=function,
        )

    def record_collection(self, phase: str, _facts: dict[str, int]) -> None:
        """Note when the garbage collector begins or ends."""
        now = time.perf_counter()
        if phase == "start":
            self.collecting = now
        else:
            self.collected += now - self.collecting

    def watch(self) -> None:
        """Note the running function every few milliseconds, forever."""
        while True:
            time.sleep(FLOOR / 2)
            if self.began and time.perf_counter() - self.began > FLOOR / 2:
                frame = sys._current_frames().get(self._thread)  # noqa: SLF001
                self.seen[_find_function(frame)] += 1


def _find_function(frame: FrameType | None) -> str:
    """The innermost function of the exporter, and the function that it has called."""
    called = "" if frame is None else f" ({frame.f_code.co_qualname})"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            module = Path(code.co_filename).relative_to(_PACKAGE).with_suffix("").as_posix()
            return f"{module.replace('/', '.')}: {code.co_qualname}{called}"
        frame = frame.f_back
    return f"outside the exporter{called}"


def _timed(self: asyncio.Handle) -> None:
    recorder.run(self)


if __name__ == "__main__":
    recorder = Recorder()
    asyncio.Handle._run = _timed  # type: ignore[method-assign]  # noqa: SLF001
    gc.callbacks.append(recorder.record_collection)
    threading.Thread(target=recorder.watch, daemon=True).start()
    sys.exit(main())
