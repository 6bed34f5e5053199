"""The caller's module does not change, whether or not it can be traced."""

import copy
import io
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import regauge as rg

Writes = Callable[["Awkward", Tensor, Tensor], Any]


class Memory:
    """An object that is not a module, but contains a layer, like caches of keys and values."""

    def __init__(self) -> None:
        self.calls, self.kept, self.inner = 0, deque([1.0]), Layer()


class Layer:
    def __init__(self) -> None:
        self.keys: list[Any] = []


class Awkward(nn.Module):
    """Two layers, with a given function of the module, the input and the hidden units between them."""

    def __init__(self, writes: Writes, *, is_traceable: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.writes, self.is_traceable = writes, is_traceable
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 2), nn.BatchNorm1d(6)
        self.register_buffer("cache", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.rand(6, generator=generator))
        self.register_buffer("hidden", torch.rand(6, generator=generator), persistent=False)
        self.free = nn.Parameter(torch.randn(6, generator=generator))
        self.plain, self.calls, self.temporary = torch.zeros(3), 0, "there"
        self.features: list[Any] = []
        self.by_name: OrderedDict[str, Any] = OrderedDict(first=[torch.ones(2)], second={"deep": (torch.zeros(1),)})
        self.seen = {1}
        self.memory = Memory()
        self.a.register_forward_hook(lambda module, inputs, output: output)
        self.free.grad = torch.ones(6)
        self.b.eval()
        self.average.requires_grad_(False)
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        self.writes(self, x, h)
        if not self.is_traceable and bool((h.sum() + self.free.sum()) > -1e9):
            h = 2 * h
        result: Tensor = self.b(self.norm(h))
        return result


def nothing(m: Awkward, x: Tensor, h: Tensor) -> Any: ...


def empty_buffer(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.cache = h


def new_attributes(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.last, m.calls = h, m.calls + 1
    m.a.seen = [h]


def attribute_removed(m: Awkward, x: Tensor, h: Tensor) -> Any:
    vars(m).pop("temporary", None)


def containers(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.features.append(h)
    m.by_name["first"].append(h)
    m.by_name["second"]["deep"] = h
    m.by_name.move_to_end("first")
    m.seen.add(2)


def objects(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.memory.calls += 1
    m.memory.kept.append(h)
    m.memory.inner.keys.append(h)


def counters(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.count += 1
    m.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)


def replaced_buffers(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.average = 0.9 * m.average + 0.1 * h.detach().mean(0)
    m.count = m.count + 1
    m.hidden = m.hidden * 2


def plain_tensor(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.plain = m.plain + h.detach().mean()


def clipped_parameters(m: Awkward, x: Tensor, h: Tensor) -> Any:
    with torch.no_grad():
        m.free.clamp_(-0.1, 0.1)


def plain_tensor_in_place(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.plain.add_(1)


def clipped_data(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.free.data.mul_(2)
    m.b.weight.data = m.b.weight.data.clamp(-0.01, 0.01)
    m.average.data.add_(1)


def flags(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.a.bias.requires_grad_(True)
    m.free.requires_grad_(False)
    m.b.train()


def gradients(m: Awkward, x: Tensor, h: Tensor) -> Any:
    with torch.enable_grad():
        m.free.square().sum().backward()
        m.b.weight.square().sum().backward()


def hooks(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.b.register_forward_hook(lambda module, inputs, output: None)
    m.a._forward_hooks.clear()


def training_statistics(m: Awkward, x: Tensor, h: Tensor) -> Any:
    nn.functional.batch_norm(h, m.norm.running_mean, m.norm.running_var, training=True)


def new_part(m: Awkward, x: Tensor, h: Tensor) -> Any:
    m.extra = nn.Linear(2, 2)


def written_input(m: Awkward, x: Tensor, h: Tensor) -> Any:
    x.mul_(2)


TRACED = (
    nothing,
    empty_buffer,
    new_attributes,
    attribute_removed,
    containers,
    objects,
    counters,
    replaced_buffers,
    plain_tensor,
    clipped_parameters,
    training_statistics,
    flags,
    hooks,
)
"""Actions of a module that can be traced."""
EVERY = (*TRACED, plain_tensor_in_place, clipped_data, gradients, new_part, written_input)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return every tensor that an object contains, with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | deque):
        items = list(enumerate(value))
    else:
        items = list(vars(value).items()) if isinstance(value, nn.Module | Memory | Layer) else []
    for key, one in items:
        yield from tensors_of(one, f"{path}.{key}")


def shape_of(value: Any) -> Any:
    """Return the components of an object in their order, without the values of tensors."""
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf else None
        return type(value), id(value), value.requires_grad, id(grad)
    if isinstance(value, dict):
        return [(key, shape_of(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return type(value), [shape_of(one) for one in value]
    if isinstance(value, nn.Module | Memory | Layer):
        return id(value), type(value), shape_of(vars(value))
    return value


def values_of(module: nn.Module) -> dict[str, Tensor]:
    found = dict(tensors_of(module))
    found |= {f"{name}.grad": t.grad for name, t in found.items() if t.is_leaf and t.grad is not None}
    return {name: t.detach().clone() for name, t in found.items()}


@pytest.mark.parametrize(
    ("writes", "is_traceable"),
    [*((one, True) for one in TRACED), *((one, False) for one in EVERY)],
    ids=lambda value: getattr(value, "__name__", "traceable" if value else "untraceable"),
)
def test_the_module_is_as_it_was(writes: Writes, is_traceable: bool) -> None:
    module = Awkward(writes, is_traceable=is_traceable)
    module.train()
    module.b.eval()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    given, names = x.clone(), list(module.state_dict())
    shape, values = shape_of(module), values_of(module)
    if is_traceable:
        rg.discover(module, (x,))
    else:
        with pytest.raises(rg.TraceError, match="depends on the values"):
            rg.discover(module, (x,))
    assert list(module.state_dict()) == names
    assert shape_of(module) == shape
    after = values_of(module)
    assert list(after) == list(values)
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert torch.equal(x, given)
    module.writes = nothing
    module.a._forward_hooks.clear()
    copy.deepcopy(module)
    torch.save(module.state_dict(), io.BytesIO())
    assert module(x).isfinite().all()


def test_a_forward_of_its_own_and_a_registered_leaf_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(nn.Linear):
        pass

    monkeypatch.setattr("regauge.discovery.registry._LEAVES", {})
    rg.discovery.register_leaf(Part)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Part(6, 2))
    own = module[2].forward
    module[2].forward = own
    rg.discover(module, (torch.randn(3, 4),))
    assert vars(module[2])["forward"] is own


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x).relu())
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None: ...


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Any, lengths: Tensor | None = None) -> Tensor:
        if not isinstance(x, Tensor):
            return self.out(self.cells(x)[0].data)
        lengths = torch.tensor([3, 2]) if lengths is None else lengths
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0])


def quantized(module: nn.Module, kinds: set[type[nn.Module]]) -> nn.Module:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    result: nn.Module = torch.ao.quantization.quantize_dynamic(module, kinds)
    return result


ROWS, STEPS = torch.randn(3, 4), torch.randn(2, 3, 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], str]] = {
    "quantized": (lambda: quantized(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), {nn.Linear}), (ROWS,), "'0'"),
    "quantized cells": (lambda: quantized(Packed(), {nn.GRU}), (STEPS,), "'cells' .GRU. is quantized"),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 6))), (ROWS,), "compiled with torch.jit"),
    "part in script": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 6)), nn.Linear(6, 2)),
        (ROWS,),
        "Linear was compiled with torch.jit",
    ),
    "lazy": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(2)), (ROWS,), "'1' .LazyLinear. has no weights yet"),
    "packed": (Packed, (STEPS,), r"test_untouched.py, line \d+.*sequences of several lengths"),
    "packed by input": (Packed, (STEPS, torch.tensor([3, 2])), "sequences of several lengths"),
    "packed input": (Packed, (pack_sequence([ROWS, ROWS[:2]]),), "sequences of several lengths"),
    "branch": (
        lambda: Awkward(nothing, is_traceable=False),
        (ROWS,),
        r"test_untouched.py, line \d+: if not self.is_traceable.*depends on the values of a tensor",
    ),
}


def test_a_network_that_is_to_be_quantized_later_is_not_quantized() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)
            self.sum = torch.ao.nn.quantized.FloatFunctional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.sum.add_relu(self.first(x), self.second(x)))

    symmetry = rg.discover(Sum().eval(), (ROWS,))
    assert [(group.kind, group.size) for group in symmetry.groups] == [("scaled", 6)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_gets_a_sentence_that_fits(name: str) -> None:
    make, inputs, expected = REFUSED[name]
    with pytest.raises(rg.TraceError, match=expected) as caught:
        rg.discover(make(), inputs)
    for word in ("Guard", "unhinted", "FakeTensor", "is_meta", "Uninitialized", "u0", "size'"):
        assert word not in str(caught.value)


def test_a_state_that_is_no_tensor_is_no_obstacle() -> None:
    symmetry = rg.discover(Plain(), (ROWS,))
    assert [group.kind for group in symmetry.groups] == ["scaled"]
    assert symmetry.verify(Plain(), (ROWS,), generator=torch.Generator().manual_seed(0)).ok


@pytest.mark.parametrize("writes", [new_attributes, containers], ids=lambda writes: writes.__name__)
def test_what_an_earlier_pass_left_is_no_obstacle_to_verification(writes: Writes) -> None:
    module = Awkward(writes, is_traceable=True).eval()
    module(ROWS)
    symmetry = rg.discover(module, (ROWS,))
    assert any(note.startswith("verified") for note in symmetry.notes), symmetry.notes
