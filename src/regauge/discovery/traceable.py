"""Checks whether modules can be traced, and error messages that name the cause if a module cannot be traced."""

import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.ao.nn.quantized import FloatFunctional
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

FOREIGN = (Path(torch.__file__).parent, Path(__file__).parents[1])
"""The folders that contain the code of torch and of regauge."""
QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
"""The Python modules that define quantized layers."""
WITHOUT_VALUES = "its data is not allocated yet"
"""A part of torch's error message if a constructor, such as `torch.tensor` of a list, reads meta tensors."""
DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
"""The errors that torch raises if Python code needs the entries of a traced tensor."""
OTHERWISE = (
    "trace the part of the model that matters, register the offending part with `regauge.discovery.register_leaf`, or "
    "write the symmetry by hand with `regauge.Symmetry.from_axes`"
)


class TraceError(RuntimeError):
    """Error if torch.export cannot convert a model to a graph."""


def require_traceable(module: nn.Module) -> None:
    """Raise a TraceError if the weights of a module are quantized or not created yet."""
    for name, part in module.named_modules():
        where = f"layer {name!r} ({type(part).__name__})" if name else type(part).__name__
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        is_quantized = type(part).__module__.startswith(QUANTIZED) and not isinstance(part, FloatFunctional)
        if is_quantized or any(t.is_quantized for t in own if isinstance(t, Tensor)):
            raise TraceError(
                f"{where} is quantized: its weights are integers, which no scale, sign or rotation moves; discover the "
                "symmetry of the module as it was before, transform its weights, and quantize it again"
            )
        if any(is_lazy(tensor) for tensor in own):
            raise TraceError(
                f"{where} has no weights yet: it learns their shapes from its first input; call the module once on the "
                "example inputs, and discover afterwards"
            )


def trace_error(error: BaseException, module: nn.Module, inputs: object) -> TraceError:
    """Return the error for a module that runs but that torch.export cannot trace."""
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    start = f"torch.export cannot trace {type(module).__name__}"
    if scripted:
        name = getattr(scripted[0], "original_name", type(scripted[0]).__name__)
        return TraceError(
            f"{start}: {name} was compiled with torch.jit, and its Python code is needed; give the module that was "
            "compiled, whose parameters have the same names"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return TraceError(f"{start}: give the wrapped module, `ddp.module`, and networks as its `state_dict()`")
    start += _place_of(error)
    if _packs(error, inputs):
        return TraceError(
            f"{start}: it packs sequences of several lengths, which depends on values; trace the model with padded "
            "sequences, without `pack_padded_sequence`: its parameters have the same symmetry"
        )
    if depends_on_values(error):
        return TraceError(
            f"{start}: its control flow depends on the values of a tensor. Remove this control flow, {OTHERWISE}"
        )
    first = str(error).strip().splitlines()
    return TraceError(
        f"{start}: {type(error).__name__}: {first[0].rstrip('.') if first else ''}. To continue, {OTHERWISE}"
    )


def depends_on_values(error: BaseException) -> bool:
    """Return whether torch stopped because Python code needs the entries of a tensor."""
    return any(isinstance(one, DEPENDENT) or WITHOUT_VALUES in str(one) for one in _chain(error))


def _packs(error: BaseException, inputs: object) -> bool:
    """Return whether the inputs contain packed sequences, or an error comes from code for packed sequences."""
    leaves = pytree.tree_leaves(inputs, is_leaf=lambda x: isinstance(x, PackedSequence))
    if any(isinstance(one, PackedSequence) for one in leaves):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        where = Path(frame.f_code.co_filename).parts[-3:]
        is_read = where == ("nn", "modules", "rnn.py") and frame.f_locals.get("batch_sizes") is not None
        if is_read or where == ("nn", "utils", "rnn.py"):
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _place_of(error: BaseException) -> str:
    """Return the last line in a traceback that belongs to the code of the model, not to torch, regauge or Python."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_model_code(Path(frame.filename))]
    return f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def _is_model_code(file: Path) -> bool:
    is_installed = any(part in ("site-packages", "dist-packages") for part in file.parts)
    is_python = file.is_relative_to(Path(traceback.__file__).parent) and not is_installed
    return file.exists() and not is_python and not any(file.is_relative_to(folder) for folder in FOREIGN)
