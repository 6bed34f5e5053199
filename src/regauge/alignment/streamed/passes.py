"""Passes over two checkpoints, which show progress in bytes and record the duration of each pass."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.memory_limit import size_text
from regauge.core.progress import ALONE, Advance, Crew, Progress, no_advance


class Passes:
    """A counter of the bytes that are read from some checkpoints.

    Args:
        checkpoints: The checkpoints that are read.
        timings: A list to which a message about each pass is appended.
        progress: A function that shows the progress of each pass.
        crew: The processes that share the work of each pass.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        timings: list[str],
        progress: Progress,
        crew: Crew = ALONE,
    ) -> None:
        self.crew = crew
        self._checkpoints, self._timings, self._progress = tuple(checkpoints), timings, progress
        self._left = 0
        self._show: Advance = no_advance

    @property
    def bytes_and_seconds(self) -> tuple[int, float]:
        """The number of bytes read so far, and the seconds that reading them took."""
        readings = [one.read_so_far for one in self._checkpoints]
        return sum(r.nbytes for r in readings), sum(r.seconds for r in readings)

    @contextmanager
    def timed(self, label: str, nbytes: int) -> Iterator[None]:
        """Show the progress of a pass that reads at most `nbytes` bytes, and record its duration."""
        self._left, self._show = nbytes, self._progress(label, nbytes)
        before = self.bytes_and_seconds
        start, busy = time.perf_counter(), time.process_time()
        yield
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        read, reading = (now - then for now, then in zip(self.bytes_and_seconds, before, strict=True))
        if read:
            self._timings.append(
                f"  {label}: {seconds:.1f} s ({busy:.1f} s of processor time), of which {reading:.2f} s reading "
                f"{size_text(read)} ({size_text(read / max(reading, 1e-9))}/s)"
            )
        self.advance(self._left)

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes were read."""
        nbytes = min(nbytes, self._left)
        self._show(nbytes)
        self._left -= nbytes
