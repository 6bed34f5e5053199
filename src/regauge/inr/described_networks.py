"""Models of checkpoints whose header describes an INR, and signals as the data on which they are evaluated."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from regauge.checkpoints.array_files import read_arrays
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.task import Task
from regauge.hub.build_model import Built
from regauge.inr.fields.signal_samples import EVALUATION
from regauge.inr.named_signals import is_signal, read_signal, signal_samples
from regauge.inr.representation import Inr, load_inr, read_inr


def build(checkpoint: Checkpoint, *, with_values: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module of an INR and example inputs. If `with_values`, the module has the checkpoint's parameters."""
    params, inr = load_inr(checkpoint) if with_values else (None, read_inr(checkpoint))
    dtype = next(iter(checkpoint.stored.values())).dtype
    module = inr.module(params).to(dtype)
    points = torch.linspace(-1, 1, 8 * inr.in_features, dtype=dtype).reshape(8, inr.in_features)
    return module, (points,)


def find_task(model: Built, text: str, *, loss: str, dtype: torch.dtype) -> Task | None:
    """Return a task for an INR on a named signal: 10,000 points of a shape, all cells of a grid, or all pixels.

    The points are always the same, so losses of different commands can be compared. The result is None if `text` is not
    the name of a signal.
    """
    if not _is_signal(text):
        return None
    assert model.checkpoint is not None
    inr = read_inr(model.checkpoint)
    if inr.signal == "image" and loss != "mse":
        raise ValueError("networks of images are compared by squared errors: give `loss=mse`")
    samples = signal_samples(read_signal(text), inr, EVALUATION, generator=torch.Generator().manual_seed(0)).to(dtype)
    return Task(model.module, [(samples.points, samples.labels)], _criterion(inr, loss))


def _is_signal(text: str) -> bool:
    """Return whether DATA is the name of a signal, and not a factory or a file with the arrays inputs and targets."""
    if not is_signal(text) or not text.endswith(".npz") or not Path(text).is_file():
        return is_signal(text)
    try:
        return not {"inputs", "targets"} <= read_arrays(text).keys()
    except ValueError:  # the reader of the file raises the error
        return False


def _criterion(inr: Inr, loss: str) -> Callable[[Tensor, Tensor], Tensor]:
    if inr.signal == "image":
        return mse_loss
    if loss == "mse":
        return lambda outputs, labels: mse_loss(torch.sigmoid(outputs), labels)
    return binary_cross_entropy_with_logits
