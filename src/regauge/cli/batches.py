"""What DATA means: batches from a factory or a file, and the loss of a model on them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from regauge.cli.errors import UsageError
from regauge.cli.models import call_factory
from regauge.core.outputs import output_tensors

FILE_SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True)
class Batch:
    """Inputs (a tensor, a tuple or a mapping of them) and targets."""

    inputs: Any
    targets: Tensor


def load_batches(text: str, size: int) -> list[Batch]:
    """The batches that `text` names.

    Args:
        text: `package.module:factory` or `file.py:factory` that returns batches (inputs, targets), or an .npz or
            .safetensors file with the arrays inputs and targets.
        size: Examples per batch, for a file.

    Raises:
        UsageError: There is no such data, or it has another form.
    """
    if text.endswith(FILE_SUFFIXES):
        arrays = _arrays(Path(text))
        if not {"inputs", "targets"} <= arrays.keys():
            raise UsageError(f"{text!r} has the arrays {sorted(arrays)}, but needs 'inputs' and 'targets'")
        inputs, targets = arrays["inputs"], arrays["targets"]
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise UsageError(f"{text!r} has {len(inputs)} inputs and {len(targets)} targets; it needs one for each")
        pairs = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        return [Batch(x, y) for x, y in pairs]
    found = call_factory(text, "DATA")
    if not isinstance(found, Iterable):
        raise UsageError(f"the factory {text!r} returned a {type(found).__name__}, but batches are needed")
    batches = [_batch(item, text) for item in found]
    if not batches:
        raise UsageError(f"the factory {text!r} returned no batches")
    return batches


def batch_evaluator(
    module: nn.Module, batches: list[Batch], *, loss: str, outputs: tuple[str, ...]
) -> Callable[[Mapping[str, Tensor]], dict[str, float]]:
    """A function from parameters to the mean loss over all targets, and the accuracy for the cross entropy.

    Floating-point inputs are converted to the dtype of the parameters.
    """
    module = module.eval()

    def evaluate(params: Mapping[str, Tensor]) -> dict[str, float]:
        dtype = next((t.dtype for t in params.values() if t.is_floating_point()), torch.float32)
        total = correct = 0.0
        count = 0
        with torch.no_grad():
            for batch in batches:
                args, kwargs = _arguments(batch.inputs, dtype)
                result = torch.func.functional_call(module, dict(params), args, kwargs, tie_weights=False)
                output = output_tensors(result, outputs or None)[0].float()
                targets = batch.targets
                if loss == "mse":
                    _require_same_shape(output, targets)
                    total += float(functional.mse_loss(output, targets.float(), reduction="sum"))
                    count += targets.numel()
                else:
                    logits, targets = output.reshape(-1, output.shape[-1]), targets.reshape(-1).long()
                    _require_classes(logits, targets)
                    total += float(functional.cross_entropy(logits, targets, reduction="sum"))
                    correct += int((logits.argmax(-1) == targets).sum())
                    count += int((targets >= 0).sum())
        values = {"loss": total / count}
        return values if loss == "mse" else values | {"accuracy": correct / count}

    return evaluate


def _arrays(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"there is no data file {str(path)!r}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.asarray(archive[name])) for name in archive.files}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read as arrays: {error}") from error


def _batch(item: Any, text: str) -> Batch:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        return Batch(item[0], item[1])
    raise UsageError(
        f"the factory {text!r} returned a {type(item).__name__} as a batch; a batch is (inputs, targets), where "
        "targets is a tensor"
    )


def _arguments(inputs: Any, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(inputs, Mapping):
        return (), {name: convert(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(convert(value) for value in inputs), {}
    return (convert(inputs),), {}


def _require_same_shape(output: Tensor, targets: Tensor) -> None:
    if output.shape != targets.shape:
        raise UsageError(
            f"the model's output has shape {tuple(output.shape)}, but the targets have {tuple(targets.shape)}; "
            "choose another output with --outputs, or other data"
        )


def _require_classes(logits: Tensor, targets: Tensor) -> None:
    if len(logits) != len(targets):
        raise UsageError(
            f"the model's output has {len(logits)} rows of {logits.shape[-1]} logits, but there are {len(targets)} "
            "targets; choose another output with --outputs, or other data"
        )
    if int(targets.max()) >= logits.shape[-1]:
        raise UsageError(f"a target is class {int(targets.max())}, but the model has {logits.shape[-1]} outputs")
