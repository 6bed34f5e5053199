"""The surroundings of the cases in `gpu.py`: a device next to the CPU, the remaining time, and counts of laws."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from regauge.core.devices import to_device

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A device, and the remaining time budget.

    Attributes:
        device: The device that is measured.
        is_small: Whether the small sizes of a test are used.
        until: The time of `time.monotonic` at which the budget ends.
    """

    device: torch.device
    is_small: bool
    until: float

    @property
    def left(self) -> float:
        """The remaining seconds."""
        return self.until - time.monotonic()

    @property
    def cpu(self) -> "Place":
        """The CPU of the same machine."""
        return replace(self, device=torch.device("cpu"))

    def sized(self, large: T, small: T) -> T:
        """Return the size of a measurement, or a smaller size for tests."""
        return small if self.is_small else large

    def bring(self, values: Any) -> Any:
        """Return tensors, modules, or tuples and mappings of them on the device."""
        return to_device(values, self.device)

    def generator(self, seed: int) -> torch.Generator:
        """Return a random generator on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return the result of a call, and its wall-clock seconds."""
        self.wait()
        began = time.perf_counter()
        found = call()
        self.wait()
        return found, time.perf_counter() - began

    def forget(self) -> None:
        """Free the memory of earlier cases on the device, and restart the measurement of peak memory."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """The largest number of bytes of tensors on the device since `forget`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


@dataclass
class Laws:
    """The tested laws, with the largest error that was within its bound, and the failed laws."""

    place: Place
    tried: int = 0
    worst: float = 0.0
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def law(self, name: str) -> Iterator[None]:
        """Count a law. An exception within the context counts as a failure, and the next law follows."""
        self.tried += 1
        try:
            yield
        except TimeoutError:
            raise
        except Exception as error:  # any failure must leave the other laws to be tried
            text = " ".join(str(error).split())[:200]
            self.failed.append(f"{name}: {type(error).__name__}: {text}" if text else f"{name}: {type(error).__name__}")

    def equal(
        self, found: Tensor | Mapping[str, Tensor], expected: Tensor | Mapping[str, Tensor], within: float
    ) -> None:
        """Raise an error unless values on the device differ by at most this share of the largest value."""
        if isinstance(found, Mapping):
            assert isinstance(expected, Mapping)
            require(found.keys() == expected.keys(), "other names")
            for name in found:
                self.equal(found[name], expected[name], within)
            return
        assert isinstance(expected, Tensor)
        require(found.device.type == self.place.device.type, f"a result is on {found.device}")
        x, y = found.detach().cpu().double(), expected.detach().cpu().double()
        require(x.shape == y.shape, f"{tuple(x.shape)} is not {tuple(y.shape)}")
        if x.numel():
            error = float((x - y).abs().max()) / max(float(y.abs().max()), 1e-30)
            require(error <= within, f"error {error:.3g} above {within:.3g}")
            self.worst = max(self.worst, error)

    def there(self, params: Mapping[str, Tensor]) -> None:
        """Raise an error unless every tensor is on the device."""
        away = [name for name, tensor in params.items() if tensor.device.type != self.place.device.type]
        require(not away, f"not on the device: {away[:3]}")

    def row(self) -> dict[str, Any]:
        """Return the counts for the record of a case."""
        status = {"status": "failed"} if self.failed else {}
        return {"laws": self.tried, "failed": self.failed, "worst_error": self.worst, **status}


def require(condition: bool, what: str) -> None:
    """Raise an AssertionError with a message unless a condition holds."""
    if not condition:
        raise AssertionError(what)
