"""The clock of a training: the elapsed time, and whether the time limit is reached."""

import time


class Clock:
    """The clock of a training, with an optional time limit.

    Args:
        limit: Seconds after which the training ends; None for no limit.
        is_cpu_time: Whether CPU seconds of this process are counted instead of wall-clock seconds. CPU seconds give the
            same budget on a busy machine.
        spent: Seconds that passed before an interruption of the training.
    """

    def __init__(self, limit: float | None = None, *, is_cpu_time: bool = False, spent: float = 0.0) -> None:
        self.limit = limit
        self._now = time.process_time if is_cpu_time else time.monotonic
        self._begun = self._now() - spent

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return self._now() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.seconds >= self.limit

    def pace(self, step: int, steps: int) -> int:
        """Return the place in the schedule at a step, both from 0 to `steps - 1`; the place is ahead of the step if the
        time limit comes first.
        """
        if self.limit is None:
            return step
        return min(steps - 1, max(step, int(steps * self.seconds / self.limit) if self.limit else steps))
