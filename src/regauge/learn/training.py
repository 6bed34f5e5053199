"""Training of a net over networks: epochs of batches, validation, the best weights, and a state to resume from."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regauge.core.devices import find_device
from regauge.core.params import Params
from regauge.core.progress import Advance, Progress, no_progress
from regauge.learn.training_state import State, read_state, save_state
from regauge.storage.loader import Batch, Loader
from regauge.training import AdamW
from regauge.training.schedules import OneCycle, Schedule
from regauge.training.settings import derive_seed

SAVE_SECONDS = 60.0
"""Seconds between two states that are saved: what a kill loses."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training, shared by everything that is trained on networks.

    Attributes:
        epochs: How often each network is read at most.
        batch: Networks of a step.
        lr: Largest learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        schedule: How the learning rate changes; up for a twentieth of the steps, then down as a cosine, unless given.
        clip: Largest norm of a gradient; longer ones are shortened.
        patience: Epochs without a better validation after which the training ends; none if None.
        seconds: Seconds of training after which the best so far is returned; no limit if None. The learning rate
            follows the steps or the seconds, whichever are nearer to their end, so that a run that is cut short by
            them depends on the machine's speed.
        is_cpu_time: Whether these are CPU seconds of this process, the same budget on a busy machine, and not those of
            the clock.
        average: The net that is validated and kept has an exponential moving average of the weights with this decay, at
            first less: (1 + steps) / (10 + steps) where that is smaller. None: the weights of the last step.
        device: Where the net is trained, such as "cpu" or "cuda".
    """

    epochs: int = 100
    batch: int = 64
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Schedule = field(default_factory=lambda: OneCycle(rise=0.05, start=0.04, end=1e-2))
    clip: float = 1.0
    patience: int | None = None
    seconds: float | None = None
    is_cpu_time: bool = False
    average: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        is_whole = self.epochs >= 1 and self.batch >= 1 and (self.patience is None or self.patience >= 1)
        is_positive = self.lr > 0 and self.weight_decay >= 0 and self.clip > 0
        if not is_whole or not is_positive or (self.seconds is not None and not self.seconds > 0):
            raise ValueError(
                f"epochs={self.epochs}, batch={self.batch}, lr={self.lr}, weight_decay={self.weight_decay}, "
                f"clip={self.clip}, patience={self.patience} and seconds={self.seconds} make no training; all are "
                "positive, weight_decay may be 0, and patience and seconds None"
            )
        if self.average is not None and not 0 < self.average < 1:
            raise ValueError(
                f"average={self.average} is no decay of a moving average; it lies between 0 and 1, or is None"
            )
        find_device(self.device)


class Validation(NamedTuple):
    """The result of an evaluation: `order` is smaller for better nets, `facts` are numbers to print."""

    order: tuple[float, ...]
    facts: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """The record of a training.

    Attributes:
        history: For each epoch: its number, the steps so far, the mean training loss, the learning rate at its end,
            the seconds so far, and the facts of the validation.
        best: The epoch whose weights were kept, as in `history`.
        ended: Why the training ended: "epochs", "patience" or "seconds".
    """

    history: tuple[Mapping[str, float], ...]
    best: int
    ended: str

    def after(self, earlier: Sequence[Mapping[str, float]]) -> "Trained":
        """This training as the end of another one: epochs, steps and seconds count on from those of its history."""
        if not earlier:
            return self
        last = earlier[-1]
        added = {"epoch": last["epoch"] + 1, "step": last["step"], "seconds": last["seconds"]}
        rows = ({name: value + added.get(name, 0) for name, value in row.items()} for row in self.history)
        return Trained((*earlier, *rows), self.best + len(earlier), self.ended)


def train(
    net: nn.Module,
    loader: Loader,
    loss: Callable[[Batch, torch.Generator], Tensor],
    validate: Callable[[], Validation],
    config: Training,
    *,
    seed: int,
    state: Path | None = None,
    continues: bool = True,
    inputs: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Trained:
    """Train a net in place; it ends with the weights of its best validation.

    All chance follows from `seed` and the number of the step, also that of dropout, so that a training that is resumed
    gives the bits of one that was not interrupted.

    Args:
        net: Its parameters are trained, but for those that need no gradient.
        loader: Batches of networks, at the start of an epoch.
        loss: From a batch and a source of chance to the mean loss.
        validate: Evaluates the net, which is in evaluation mode.
        config: Settings.
        seed: The seed of all chance in `loss`.
        state: A `.safetensors` file in which the training is kept while it runs. If it exists, it is continued.
        continues: Whether it is; else it is replaced once this training has a state.
        inputs: Everything that the training depends on, as JSON; a state of others is refused.

    Raises:
        ValueError: A loss is not finite, or the state is of a training with other inputs.
    """
    optimizer = _optimizer(net, config)
    now = State(best={name: tensor.clone() for name, tensor in net.state_dict().items()})
    if config.average is not None:
        now.average = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    if state is not None and continues and state.exists():
        now = read_state(state, net, optimizer, loader, inputs or {})
    clock = time.process_time if config.is_cpu_time else time.monotonic
    steps, begun, saved = config.epochs * len(loader), clock() - now.seconds, time.monotonic()
    bar = _Bar.of(progress, now, config, steps)
    while not now.ended:
        net.train()
        for batch in loader:
            now.seconds = clock() - begun
            if config.seconds is not None and now.seconds >= config.seconds:
                break
            rate = config.schedule.rate(min(steps - 1, int(_place(now, config, steps))), steps).factor * config.lr
            value = _step(net, optimizer, loss, batch, rate, config, derive_seed(seed, "step", now.step))
            if not math.isfinite(value):
                raise ValueError(
                    f"the training loss was {value} at step {now.step}; lower the learning rate ({config.lr}), or look "
                    "for networks with huge values"
                )
            now.step, now.total, now.count, now.rate = now.step + 1, now.total + value, now.count + 1, rate
            if config.average is not None:
                _follow(now.average, net, min(config.average, (1 + now.step) / (10 + now.step)))
            bar.show(now.step if config.seconds is None else clock() - begun, loss=value)
            is_last = now.count == len(loader)
            if state is not None and not is_last and time.monotonic() - saved > SAVE_SECONDS:
                now.seconds, saved = clock() - begun, time.monotonic()
                save_state(state, net, optimizer, loader, now, inputs or {})
        is_late = config.seconds is not None and clock() - begun >= config.seconds
        if now.count:
            with _averaged(net, now.average):
                _validate(net, validate, now)
        now.seconds = clock() - begun
        if now.history:
            now.history[-1]["seconds"] = now.seconds
        done = len(now.history)
        if is_late:
            now.ended = "seconds"
        elif done >= config.epochs:
            now.ended = "epochs"
        elif config.patience is not None and done - 1 - now.best_epoch >= config.patience:
            now.ended = "patience"
        if state is not None and (now.ended or time.monotonic() - saved > SAVE_SECONDS):
            saved = time.monotonic()
            save_state(state, net, optimizer, loader, now, inputs or {})
    if config.seconds is not None:
        bar.show(now.seconds)
    net.load_state_dict(now.best)
    net.eval()
    return Trained(tuple(now.history), now.best_epoch, now.ended)


class _Bar:
    """A training's progress: in seconds where these may end it, or else in steps. It ends where the training does."""

    def __init__(self, advance: Advance, total: float) -> None:
        self._advance, self._total, self._shown = advance, total, 0.0

    @classmethod
    def of(cls, progress: Progress, now: State, config: Training, steps: int) -> "_Bar":
        """The bar of a training, which may have begun."""
        if config.seconds is None:
            made, done = cls(progress("training", steps), steps), float(now.step)
        else:
            made, done = cls(progress("training, seconds", config.seconds), config.seconds), now.seconds
        if done:
            made.show(done)
        return made

    def show(self, done: float, *, loss: float | None = None) -> None:
        """Bring it to where the training is."""
        place = min(done, self._total)
        self._advance(place - self._shown, loss=loss)
        self._shown = place


def _place(now: State, config: Training, steps: int) -> float:
    """The progress of a training in steps, by its steps or its seconds, whichever are nearer to their end."""
    return max(now.step, 0.0 if config.seconds is None else steps * min(1.0, now.seconds / config.seconds))


def _optimizer(net: nn.Module, config: Training) -> torch.optim.Optimizer:
    """Weight decay is for matrices; biases, gains and single numbers have none."""
    groups: Sequence[list[Tensor]] = ([], [])
    for parameter in net.parameters():
        groups[parameter.ndim < 2].append(parameter)
    kinds = [
        {"params": params, "weight_decay": config.weight_decay if k == 0 else 0.0}
        for k, params in enumerate(groups)
        if params
    ]
    return AdamW(lr=config.lr).make(kinds, {"lr": config.lr, "weight_decay": config.weight_decay})


def _step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch, torch.Generator], Tensor],
    batch: Batch,
    rate: float,
    config: Training,
    seed: int,
) -> float:
    device = torch.device(config.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        torch.manual_seed(seed)  # dropout knows no other source of chance
        value = loss(batch, torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(net.parameters(), config.clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    found = float(value.detach())
    if math.isfinite(found):
        optimizer.step()
    return found


@torch.no_grad()
def _follow(average: Params, net: nn.Module, decay: float) -> None:
    """Bring moving averages a step nearer to the weights."""
    for name, parameter in net.named_parameters():
        average[name].lerp_(parameter, 1 - decay)


@contextmanager
def _averaged(net: nn.Module, average: Params) -> Iterator[None]:
    """A net with moving averages in place of its weights, where there are any."""
    own = {name: parameter.data for name, parameter in net.named_parameters() if name in average}
    for name, parameter in net.named_parameters():
        parameter.data = average.get(name, parameter.data)
    yield
    for name, parameter in net.named_parameters():
        parameter.data = own.get(name, parameter.data)


def _validate(net: nn.Module, validate: Callable[[], Validation], now: State) -> None:
    """Evaluate the net after an epoch, and keep its weights if they are the best."""
    net.eval()
    with torch.no_grad():
        found = validate()
    if not all(map(math.isfinite, found.order)):
        raise ValueError(
            f"the validation loss was {found.order[-1]} after step {now.step}; lower the learning rate, or look for "
            "networks with huge values"
        )
    row = {"epoch": len(now.history), "step": now.step, "loss": now.total / now.count, "lr": now.rate}
    now.history.append({**row, **found.facts})
    now.total, now.count = 0.0, 0
    if not now.order or found.order < tuple(now.order):
        now.order, now.best_epoch = list(found.order), len(now.history) - 1
        now.best = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
