"""Copies of a module with other sizes of tensors, and with other sizes in the attributes of layers."""

import copy
from collections.abc import Callable, Mapping
from itertools import islice, product
from typing import Any, TypeAlias

from torch import Tensor, nn

from regauge.core.symmetry import Symmetry
from regauge.pruning.slices import kept_entries

TRIALS = 64
"""The largest number of combinations of new attribute values that are tried."""
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors that modules raise if their attributes do not fit their tensors."""
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Accept: TypeAlias = Callable[[nn.Module], bool]
Key: TypeAlias = tuple[str, str, int]
"""A module class, the name of an integer attribute, and its value."""


def resize(
    module: nn.Module, params: Mapping[str, Tensor], before: Symmetry, after: Symmetry, accept: Accept
) -> nn.Module:
    """Make a working copy of a module with the tensors of a smaller network.

    The shapes of tensors determine the attributes of torch's own layers (`out_features`, `groups`, ...). Integer
    attributes of other modules, such as a number of heads, are found by trial. An integer that equals a changed size
    gets the new size, in all modules of a class at once. The search ends when a copy is accepted.

    Args:
        module: The module with the original sizes, which is not changed.
        params: The tensors of the smaller network.
        before: The symmetry of the module.
        after: The symmetry of the smaller network.
        accept: A function that returns whether a copy computes the right outputs. An exception counts as False.

    Raises:
        ValueError: No copy is accepted.
    """
    result = copy.deepcopy(module)
    _replace_tensors(result, params)
    for name, layer in result.named_modules():
        _set_numbers(layer, f"{name}." if name else "", before, after)
    places, options = _guesses(result, before, after)
    first: Exception | None = None
    for chosen in islice(product(*options.values()), TRIALS):
        for key, number in zip(options, chosen, strict=True):
            for layer in places[key]:
                setattr(layer, key[1], number)
        try:
            if accept(result):
                return result
        except FAILURES as error:
            first = first or error
    reason = f" ({type(first).__name__}: {' '.join(str(first).split())[:160]})" if first is not None else ""
    raise ValueError(f"{type(module).__name__} does not run with these sizes, or computes something else{reason}")


def shared_sizes(module: nn.Module, symmetry: Symmetry) -> list[tuple[str, ...]]:
    """Return sets of groups whose sizes one attribute sets, such as all layers and directions of a recurrent module."""
    found = []
    for path, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            own = {f"{path}.{name}" if path else name for name in layer._flat_weights_names if "weight_hh" in name}
            places = [group.name for group in symmetry.groups if own & {p.parameter for p in group.placements}]
            found.append(tuple(places))
    return [names for names in found if len(names) > 1]


def _replace_tensors(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Replace the tensors of a module; tied parameters remain tied."""
    made: dict[int, nn.Parameter] = {}
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if name in params and id(old) not in made:
            made[id(old)] = nn.Parameter(params[name].detach().clone(), requires_grad=old.requires_grad)
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if id(old) in made:
            setattr(owners[owner], leaf, made[id(old)])
    for name, _ in list(module.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if name in params:
            setattr(owners[owner], leaf, params[name].detach().clone())


def _set_numbers(layer: nn.Module, prefix: str, before: Symmetry, after: Symmetry) -> None:
    """Set the size attributes of a torch layer from the shapes of its tensors and the sizes of their groups."""

    def blocks(count: int) -> int:
        """Return the number of equal blocks of the weight's first axis that contain kept entries."""
        name = f"{prefix}weight"
        mask = kept_entries(before, sizes).get(name, {}).get(0) if count > 1 else None
        return count if mask is None else int(mask.reshape(count, -1).any(1).sum())

    sizes = {group.name: group.size for group in after.groups}
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, nn.Bilinear):
        layer.out_features, layer.in1_features, layer.in2_features = weight.shape
    elif isinstance(layer, Convolution):
        layer.groups = blocks(layer.groups)
        layer.out_channels, layer.in_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, Transposed):
        layer.groups = blocks(layer.groups)
        layer.in_channels, layer.out_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        held = weight if weight is not None else layer.running_mean
        layer.num_features = layer.num_features if held is None else len(held)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm) and weight is not None:
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.GroupNorm) and weight is not None:
        layer.num_groups, layer.num_channels = blocks(layer.num_groups), len(weight)
    elif isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.embedding_dim = weight.shape
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = len(weight)
    elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        end = "_l0" if isinstance(layer, nn.RNNBase) else ""
        gates = {"LSTM": 4, "GRU": 3}.get(type(layer).__name__.removesuffix("Cell"), 1)
        layer.input_size = getattr(layer, f"weight_ih{end}").shape[1]
        layer.hidden_size = getattr(layer, f"weight_hh{end}").shape[0] // gates


def _guesses(
    module: nn.Module, before: Symmetry, after: Symmetry
) -> tuple[dict[Key, list[nn.Module]], dict[Key, list[int]]]:
    """Return integer attributes of modules outside of torch that may be a changed size, with possible new values.

    If a layer of the module has the old size, the old value of the attribute is tried last. If no layer has the old
    size, the old value is tried first.
    """
    changed = [name for name, shape in before.shapes.items() if after.shapes[name] != shape]
    places: dict[Key, list[nn.Module]] = {}
    options: dict[Key, list[int]] = {}
    for path, layer in module.named_modules():
        if type(layer).__module__.startswith("torch.nn."):
            continue
        prefix = f"{path}." if path else ""
        within = [name for name in changed if name.startswith(prefix)]
        sizes = new_sizes(within, before, after) if within else {}
        for attribute, number in vars(layer).items():
            if type(number) is int and number in sizes:
                key = (type(layer).__qualname__, attribute, number)
                places.setdefault(key, []).append(layer)
                known = options.setdefault(key, [])
                known += [size for size in sizes[number] if size not in known]
    for (_, _, number), known in options.items():
        if number not in known:
            known.append(number)
    return places, options


def new_sizes(names: list[str], before: Symmetry, after: Symmetry) -> dict[int, list[int]]:
    """Return new values for old axis lengths, old group sizes, and old numbers of units over all copies."""
    found: dict[int, list[int]] = {}

    def add(old: int, new: int) -> None:
        if old > 1 and old != new and new not in found.setdefault(old, []):
            found[old].append(new)

    for name in names:
        for old, new in zip(before.shapes[name], after.shapes[name], strict=True):
            add(old, new)
        for site in before.sites.get(name, ()):
            group = site.group.name
            add(site.group.size, after[group].size)
            add(before.count_copies(group) * site.group.size, after.count_copies(group) * after[group].size)
    return found
