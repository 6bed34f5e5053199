"""Selection of the outputs of a model that are compared, and evaluation mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Outputs = Callable[[Any], Any] | str | Sequence[str] | None


class OutputsError(ValueError):
    """Error if the output of a model lacks a field that `outputs` selects.

    The error has its own class, because `discover` must not report this error as a failed trace.
    """


def output_tensors(output: Any, outputs: Outputs = None) -> list[Tensor]:
    """Return the selected tensors of a model's output, in a fixed order.

    With `outputs=None`, all tensors in nested tuples, lists and mappings are selected. Objects of other classes, such
    as key-value caches, are internal state and are not selected. One or several names select fields of the output. A
    function may select any tensors of the output.

    Raises:
        OutputsError: The output has no field with a given name, or no tensor is selected.
    """
    return [tensor for tensors in named_outputs(output, outputs).values() for tensor in tensors]


def named_outputs(output: Any, outputs: Outputs = None) -> dict[str, list[Tensor]]:
    """Return the selected tensors of a model's output, each under the name or the index of its field.

    The name is empty if the model's output is a single tensor. See `output_tensors` for the selection and the errors.
    """
    if callable(outputs):
        output = outputs(output)
    elif outputs is not None:
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        output = {name: _field(output, name) for name in names}
    fields: Any = output if isinstance(output, Mapping) else {}
    if isinstance(output, tuple | list):
        fields = dict(enumerate(output))
    elif isinstance(output, Tensor):
        fields = {"": output}
    tensors = {str(name): _tensors(value) for name, value in fields.items()}
    found = {name: own for name, own in tensors.items() if own}
    if not found:
        raise OutputsError(
            f"the model's output ({type(output).__name__}) contains no floating-point tensors; name tensors with "
            "`outputs=`, a field name or a function of the output"
        )
    return found


class SelectedOutputs(nn.Module):
    """A model that returns only the selected outputs; see `named_outputs`."""

    def __init__(self, module: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.module = module
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        return named_outputs(self.module(*args, **kwargs), self.outputs)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode. Afterwards, restore the mode of every submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _field(output: Any, name: str) -> Any:
    if isinstance(output, Mapping):
        if name in output:
            return output[name]
    elif hasattr(output, name):
        return getattr(output, name)
    known = list(output) if isinstance(output, Mapping) else type(output).__name__
    raise OutputsError(f"the model's output has no {name!r} (it has {known}); name another output")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in _tensors(v)]
    return []
