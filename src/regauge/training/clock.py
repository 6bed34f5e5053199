"""Time of a training: how much has passed, and whether it is over."""

import time


class Clock:
    """Seconds of a training, which may end it.

    Args:
        limit: Seconds after which the training ends; None for no limit.
        is_cpu_time: Whether these are CPU seconds of this process, the same budget on a busy machine, and not those of
            the clock.
        spent: Seconds that passed before, in a training that was interrupted.
    """

    def __init__(self, limit: float | None = None, *, is_cpu_time: bool = False, spent: float = 0.0) -> None:
        self.limit = limit
        self._now = time.process_time if is_cpu_time else time.monotonic
        self._begun = self._now() - spent

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._now() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.seconds >= self.limit

    def pace(self, step: int, steps: int) -> int:
        """Return the place in the schedule at a step, both from 0 to `steps - 1`; ahead of it if the time runs out
        first."""
        if self.limit is None:
            return step
        return min(steps - 1, max(step, int(steps * self.seconds / self.limit) if self.limit else steps))
