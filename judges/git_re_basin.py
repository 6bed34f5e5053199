"""Git Re-Basin's specifications, tests and matchings on regauge.

    PEERS=FOLDER .venv/bin/python judges/git_re_basin.py [PIECE-OF-A-NAME ...]

Its models are of flax. Each is traced by JAX, and what it computes is run by torch, operation by operation, with its
own names of parameters: `rg.discover` sees the peer's model. A case passes if

- spec: the groups that reorder axes of its parameters are the permutations of its hand-written specification, on the
  same axes and no others;
- test: its own assertions hold when regauge matches the networks in its place, and regauge's function in float64 stays
  within 1e-9;
- matching: for networks of its models with random values, `rg.align` by its specification reaches at least the inner
  product that its `weight_matching` reaches, but for 1 in 1,000; of a permuted copy both find the permutation.

Tests without a network (`test_cosine_similarity`, three times) are no cases; scripts that train are not run.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
from zlib import crc32

import torch
from judge import Case, Failed, Peer, absent, judge
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg

PEER = Peer(
    "git-re-basin",
    "https://github.com/samuela/git-re-basin",
    "ef40098257ab97243930eba737d6dcb8edd5863e",
    (
        "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "ml_dtypes==0.6.0", "msgpack==1.2.4", "einops==0.8.2",
        "optax==0.2.8", "absl-py==2.5.1", "jax-resnet==0.0.4",
    ),
    ("tqdm", "matplotlib"),
)  # fmt: skip
ABSENT = (
    "tensorflow", "tensorflow_datasets", "wandb", "augmax", "seaborn", "torchmetrics", "mnist_mlp_run", "orbax",
    "orbax.checkpoint", "tensorstore", "treescope", "torchvision", "torchvision.datasets", "torchvision.transforms",
    "imagenet_datasets",
)  # fmt: skip
"""Modules that its scripts import for data, records and plots; `mnist_mlp_run` is no longer in its repository."""
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""
MNIST, CIFAR = (28, 28, 1), (32, 32, 3)


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout / "src"))
    importlib.import_module("flax.io")  # Before its own modules are absent.
    with absent(ABSENT):
        import jax

        jax.tree_map = jax.tree.map
        # JAX no longer takes the long numbers that Python makes of text.
        utils = importlib.import_module("utils")
        utils.rngmix = lambda rng, x: jax.random.fold_in(rng, crc32(repr(x).encode()))
        sys.modules["common"] = importlib.import_module("jax_resnet.common")  # which its resnet.py is copied from
        matching, ste, mnist_vgg = (
            importlib.import_module(name)
            for name in ("weight_matching", "cifar10_vgg_ste", "mnist_vgg_weight_matching")
        )
        nets = {name: importlib.import_module(name) for name in (
            "mnist_mlp_train", "cifar10_mlp_train", "mnist_mlp_wm_many", "cifar10_vgg_run", "mnist_vgg16_run",
            "resnet20", "resnet", "mnist_convnet_plot", "cifar10_vgg_cosine_similarity_matching",
            "mnist_mlp_cosine_similarity_matching",
        )}  # fmt: skip
    mlp, vgg = partial(matching.mlp_permutation_spec, 3), matching.vgg16_permutation_spec
    specs: list[tuple[str, Callable[[], Any], Callable[[], Any], tuple[int, ...]]] = [
        ("mlp, mnist_mlp_train", mlp, nets["mnist_mlp_train"].MLPModel, MNIST),
        ("mlp, cifar10_mlp_train", mlp, nets["cifar10_mlp_train"].MLPModel, CIFAR),
        ("mlp, mnist_mlp_wm_many", mlp, nets["mnist_mlp_wm_many"].MLPModel, MNIST),
        ("mlp of mnist_vgg_weight_matching, mnist_mlp_train", partial(mnist_vgg.mlp_permutation_spec, 3),
         nets["mnist_mlp_train"].MLPModel, MNIST),
    ]  # fmt: skip
    for source in ("cifar10_vgg_run", "mnist_vgg16_run"):
        for name in ("TestVGG", "VGG16", "VGG16ThinClassifier", "VGG16Wide"):
            specs.append((f"vgg16, {source}.{name}", vgg, getattr(nets[source], name), CIFAR))
        for width in (8, 64):
            specs.append((f"vgg16, {source}, width {width}", vgg,
                          partial(nets[source].make_vgg_width_ablation, width), CIFAR))  # fmt: skip
    specs += [
        (f"vgg16 of {module.__name__}", module.vgg16_permutation_spec, nets["cifar10_vgg_run"].TestVGG, CIFAR)
        for module in (ste, mnist_vgg)
    ]
    for width in (1, 2, 4, 8, 16, 32):
        build = partial(nets["resnet20"].ResNet, (3, 3, 3), 10, width)
        specs.append((f"resnet20, width {width}", matching.resnet20_permutation_spec, build, CIFAR))
    specs.append(("resnet20, 100 classes", matching.resnet20_permutation_spec,
                  partial(nets["resnet20"].ResNet, (3, 3, 3), 100, 4), CIFAR))  # fmt: skip
    specs.append(("resnet50", matching.resnet50_permutation_spec,
                  partial(nets["resnet"].ResNet50, n_classes=1000), (64, 64, 3)))  # fmt: skip
    for name, spec, build, shape in specs:
        yield Case(f"spec: {name}", partial(compare_spec, spec, build, shape))
    for module in (matching, mnist_vgg):
        yield Case(f"test: {module.__name__}.test_weight_matching", partial(run_matching_test, module))
    for name, test, matcher in (
        ("mnist_convnet_plot", "test_permutify", "permutify"),
        ("cifar10_vgg_cosine_similarity_matching", "test_permutify", "permutify"),
        ("mnist_mlp_cosine_similarity_matching", "test_match_filters", "match_filters"),
    ):
        yield Case(f"test: {name}.{test}", partial(run_test, nets[name], test, matcher))
    small = [
        ("mnist_mlp_weight_matching", mlp, nets["mnist_mlp_train"].MLPModel, MNIST),
        ("cifar10_mlp_weight_matching", mlp, nets["cifar10_mlp_train"].MLPModel, CIFAR),
        ("cifar10_vgg_weight_matching, width 8", vgg,
         partial(nets["cifar10_vgg_run"].make_vgg_width_ablation, 8), CIFAR),
        ("mnist_vgg_weight_matching, TestVGG", vgg, nets["mnist_vgg16_run"].TestVGG, CIFAR),
        ("cifar10_resnet20_weight_matching, width 1", matching.resnet20_permutation_spec,
         partial(nets["resnet20"].ResNet, (3, 3, 3), 10, 1), CIFAR),
        ("cifar100_resnet20_weight_matching, width 2", matching.resnet20_permutation_spec,
         partial(nets["resnet20"].ResNet, (3, 3, 3), 100, 2), CIFAR),
        ("imagenet_resnet50_weight_matching, an eighth of the width", matching.resnet50_permutation_spec,
         partial(nets["resnet"].ResNet50, n_classes=10, hidden_sizes=(8, 16, 32, 64)), (64, 64, 3)),
    ]  # fmt: skip
    for name, spec, build, shape in small:
        for kind in ("two networks", "a permuted copy"):
            yield Case(f"matching: {name}, {kind}", partial(compare_matchings, matching, spec, build, shape, kind))


def compare_spec(spec: Callable[[], Any], build: Callable[[], Any], shape: tuple[int, ...]) -> str | None:
    """Compare the permutations of a specification with those that regauge finds."""
    wanted = {frozenset(axes) for axes in spec().perm_to_axes.values()}
    names = set(spec().axes_to_perm)
    module, inputs = from_flax(build(), shape, has_values=False)
    symmetry = rg.discover(module, (inputs,))
    if missing := names - set(dict(module.named_parameters())):
        raise Failed(f"the model has no {sorted(missing)[0]}")
    found: set[frozenset[tuple[str, int]]] = set()
    others: set[str] = set()
    for group in symmetry.groups:
        if not group.has_order:
            continue
        axes = {(place.parameter, place.axis) for place in group.placements}
        others |= {name for name, _ in axes} - names
        found.add(frozenset(axis for axis in axes if axis[0] in names))
    if extra := found - wanted:
        raise Failed(
            f"regauge also has {_short(extra)}" + (f", not {_short(wanted - found)}" if wanted - found else "")
        )
    if wanted - found:
        raise Failed(f"regauge lacks {_short(wanted - found)}")
    return (
        f"regauge also moves {len(others)} running statistics, which the specification leaves out" if others else None
    )


def run_matching_test(module: ModuleType) -> str | None:
    """Run the test of one hidden layer, and compare permutations."""
    import jax

    known, seen = module.weight_matching, []

    def match(rng: Any, spec: Any, params_a: Any, params_b: Any, **_: Any) -> Any:
        theirs = known(rng, spec, params_a, params_b)
        ours = align(spec, _to_torch(params_a), _to_torch(params_b))
        found = {name: jax.numpy.asarray(ours.element[name].perm.numpy()) for name in spec.perm_to_axes}
        moved = module.apply_permutation(spec, found, params_b)
        gain = {k: inner(spec, params_a, module.apply_permutation(spec, p, params_b))
                for k, p in (("ours", found), ("theirs", theirs))}  # fmt: skip
        if abs(gain["ours"] - gain["theirs"]) > 1e-6 * abs(gain["theirs"]):
            raise Failed(f"inner products differ: {gain}")
        far = max(float((_to_torch(moved)[n] - t).abs().max()) for n, t in ours.params.items())
        if far > 1e-6:
            raise Failed(f"the permutation means something else there: tensors differ by {far:.2g}")
        seen.append(all(bool((found[name] == theirs[name]).all()) for name in found))
        return found

    module.weight_matching = match
    try:
        module.test_weight_matching()
    finally:
        module.weight_matching = known
    return None if all(seen) else "other permutations with the same inner product"


def run_test(module: Any, test: str, matcher: str) -> str | None:
    """Run a test in which regauge matches in the place of the peer."""
    from flax import traverse_util

    space = module.__dict__
    known, built = space[matcher], []
    model = space.get("TestModel") or space.get("TestVGG")
    shape = {"permutify": CIFAR if "vgg" in module.__name__ else MNIST, "match_filters": (28 * 28,)}[matcher]

    def match(first: Any, second: Any) -> Any:
        flat_a, flat_b = (module.flatten_params(one) for one in (first, second))
        net, inputs = from_flax(model() if model else built[-1], shape, has_values=False)
        net = net.to_empty(device="cpu")
        inputs = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
        bare = {name.removeprefix("params/"): tensor for name, tensor in _to_torch(flat_b).items()}
        start = {name.removeprefix("params/"): tensor for name, tensor in _to_torch(flat_a).items()}
        net.load_state_dict(bare)
        symmetry = rg.discover(net, (inputs,))
        result = rg.align(start, bare, symmetry)
        wide = _double(bare)
        before, after = (
            torch.func.functional_call(net.double(), params, (inputs.double(),))
            for params in (wide, symmetry.act(result.element, wide))
        )
        if not float((before - after).abs().max()) <= 1e-9 * float(before.abs().max()):
            raise Failed(f"the function changes by {float((before - after).abs().max()):.2g}")
        prefix = "params/" if any(name.startswith("params/") for name in flat_b) else ""
        flat = {tuple((prefix + name).split("/")): t.numpy() for name, t in result.params.items()}
        moved = traverse_util.unflatten_dict(flat)
        return moved if matcher == "permutify" else ({}, moved)

    space[matcher] = match
    if model is None:  # It makes its own model.
        import flax.linen

        class Watched(flax.linen.Module):
            def __post_init__(self) -> None:
                super().__post_init__()
                built.append(self)

        linen = MagicMock(wraps=flax.linen)
        linen.Module = Watched
        linen.initializers = flax.linen.initializers
        space["nn"] = linen
    try:
        space[test]()
    finally:
        space[matcher] = known
    return None


def compare_matchings(
    module: Any, spec: Callable[[], Any], build: Callable[[], Any], shape: tuple[int, ...], kind: str
) -> str | None:
    """Match two networks with random values by both, and compare the inner products of what they reach."""
    import jax

    spec, model = spec(), build()
    make = partial(_values, model, shape, names=set(spec.axes_to_perm))
    params_a, params_b = make(0), make(1)
    if kind == "a permuted copy":
        sizes = {name: params_a[axes[0][0]].shape[axes[0][1]] for name, axes in spec.perm_to_axes.items()}
        keys = jax.random.split(jax.random.PRNGKey(2), len(sizes))
        perms = {name: jax.random.permutation(key, n) for key, (name, n) in zip(keys, sizes.items(), strict=True)}
        params_b = module.apply_permutation(spec, perms, params_a)
    theirs = module.weight_matching(jax.random.PRNGKey(0), spec, params_a, params_b, silent=True)
    theirs = inner(spec, params_a, module.apply_permutation(spec, theirs, params_b))
    result = align(spec, _to_torch(params_a), _to_torch(params_b))
    ours = inner(spec, params_a, result.params)
    first = inner(spec, params_a, params_b)
    best = inner(spec, params_a, params_a) if kind == "a permuted copy" else theirs
    text = f"inner products: {first:.6g} as given, {theirs:.6g} by the peer, {ours:.6g} by regauge"
    if not ours - first >= 0.999 * (theirs - first):
        raise Failed(text)
    if kind == "a permuted copy" and not ours >= (1 - 1e-6) * best:
        raise Failed(f"{text}; the permutation would give {best:.6g}")
    return text if abs(ours - theirs) > 1e-3 * abs(theirs - first) else None


def align(spec: Any, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Any:
    """Match by the specification of the peer."""
    axes = {name: perms for name, perms in spec.axes_to_perm.items() if name in params_a}
    kinds = dict.fromkeys(spec.perm_to_axes, "permutation")
    symmetry = rg.Symmetry.from_axes(axes, kinds=kinds)
    return rg.align(params_a, params_b, symmetry, generator=torch.Generator().manual_seed(0))


def inner(spec: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """The inner product of two networks over the tensors that have a permutation."""
    names = [name for name, perms in spec.axes_to_perm.items() if any(perms) and name in first]
    first, second = _to_torch(first), _to_torch(second)
    return float(sum((first[name].double() * second[name].double()).sum() for name in names))


def _values(model: Any, shape: tuple[int, ...], seed: int, names: set[str]) -> dict[str, Any]:
    """Parameters as the peer draws them, with noise where it starts with constants."""
    import jax

    variables = _flat(model.init(jax.random.PRNGKey(seed), jax.numpy.zeros((1, *shape))))
    made = {}
    for k, (name, value) in enumerate(sorted(variables.items())):
        noise = 0.1 * jax.random.normal(jax.random.fold_in(jax.random.PRNGKey(seed + 100), k), value.shape)
        made[name] = value + noise if value.ndim == 1 else value
    return {name: value for name, value in made.items() if name in names}


def from_flax(model: Any, shape: tuple[int, ...], *, has_values: bool) -> tuple["FromFlax", Tensor]:
    """A torch module that runs a flax model with its names, and inputs for it; without values unless asked for."""
    import jax

    inputs = jax.ShapeDtypeStruct((2, *shape), "float32")
    variables = jax.eval_shape(model.init, jax.random.PRNGKey(0), inputs)
    flat = _flat(variables)
    names = _whole_names(variables)

    def run(flat: Mapping[str, Any], images: Any) -> Any:
        return model.apply(_nested({names[name]: value for name, value in flat.items()}), images)

    closed = jax.make_jaxpr(run)(flat, inputs)
    with torch.device("cpu" if has_values else "meta"):
        return FromFlax(closed, flat), torch.zeros(2, *shape)


class FromFlax(nn.Module):
    """What JAX traced of a model, run by torch."""

    def __init__(self, closed: Any, flat: Mapping[str, Any]) -> None:
        super().__init__()
        self.traced, self.names = _Traced(closed), sorted(flat)
        for name, value in flat.items():
            if name.endswith(("/mean", "/var")):
                self.register_buffer(name, torch.ones(value.shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(value.shape)))

    def forward(self, images: Tensor) -> Tensor:
        """The output for images `[batch, height, width, channels]`."""
        given = [*(getattr(self, name) for name in self.names), images]
        closed = self.traced.closed
        constants = [_constant(one, images) for one in closed.consts]
        (output,) = _run(closed.jaxpr, constants, given)
        return output


class _Traced:
    """What JAX traced, one for all copies of a module."""

    def __init__(self, closed: Any) -> None:
        self.closed = closed

    def __deepcopy__(self, memo: Any) -> "_Traced":
        return self


def _run(jaxpr: Any, constants: list[Any], given: list[Any]) -> list[Any]:
    """The outputs of a list of equations."""
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *given], strict=True))

    def read(atom: Any) -> Any:
        return atom.val.item() if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        inside = next((equation.params[n] for n in ("jaxpr", "call_jaxpr") if n in equation.params), None)
        if inside is not None:
            made = _run(inside.jaxpr, [_constant(one, values[0]) for one in inside.consts], values)
        else:
            made = [OPERATIONS[equation.primitive.name](*values, **equation.params)]
        known |= dict(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constant(value: Any, like: Any) -> Any:
    return torch.tensor(value.__array__().tolist(), dtype=like.dtype, device=like.device)


def _maximum(a: Any, b: Any, **_: Any) -> Any:
    """ReLU where one is zero; the other where one is minus infinity."""
    number, tensor = (
        (float(a), b) if not isinstance(a, Tensor) else (float(b), a) if not isinstance(b, Tensor) else (1, a)
    )
    if number == 0:
        return functional.relu(tensor)
    return tensor if number == float("-inf") else torch.maximum(a, b)


def _dot(a: Tensor, b: Tensor, dimension_numbers: Any, **_: Any) -> Tensor:
    (left, right), batch = dimension_numbers
    assert batch == ((), ())
    assert (tuple(left), tuple(right)) == ((a.ndim - 1,), (0,))
    return a @ b


def _broadcast(a: Any, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    if not isinstance(a, Tensor):
        return a
    places = {new: old for old, new in enumerate(broadcast_dimensions)}
    return a.reshape([a.shape[places[k]] if k in places else 1 for k in range(len(shape))]).expand(shape)


def _convolve(
    a: Tensor, b: Tensor, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    dimension_numbers: Any, feature_group_count: int, **_: Any,
) -> Tensor:  # fmt: skip
    assert tuple(lhs_dilation) == (1, 1)
    images, kernel, out = dimension_numbers.lhs_spec, dimension_numbers.rhs_spec, dimension_numbers.out_spec
    padded = functional.pad(a.permute(*images), [*padding[1], *padding[0]])
    made = functional.conv2d(padded, b.permute(*kernel), None, window_strides, 0, rhs_dilation, feature_group_count)
    return made.permute(*(out.index(k) for k in range(4)))


def _pool(a: Tensor, window_dimensions: Any, window_strides: Any, padding: Any, **_: Any) -> Tensor:
    padded = functional.pad(a.permute(0, 3, 1, 2), [*padding[2], *padding[1]], value=float("-inf"))
    return functional.max_pool2d(padded, window_dimensions[1:3], window_strides[1:3]).permute(0, 2, 3, 1)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, **_: a + b,
    "sub": lambda a, b, **_: a - b,
    "mul": lambda a, b, **_: a * b,
    "div": lambda a, b, **_: a / b,
    "max": _maximum,
    "exp": lambda a, **_: a.exp(),
    "log": lambda a, **_: a.log(),
    "rsqrt": lambda a, **_: a.rsqrt(),
    "square": lambda a, **_: a.square(),
    "integer_pow": lambda a, y, **_: a**y,
    "stop_gradient": lambda a, **_: a,
    "copy": lambda a, **_: a,
    "convert_element_type": lambda a, **_: a,
    "reshape": lambda a, new_sizes, **_: a.reshape(new_sizes),
    "squeeze": lambda a, dimensions, **_: a.squeeze(dimensions),
    "transpose": lambda a, permutation, **_: a.permute(*permutation),
    "reduce_sum": lambda a, axes, **_: a.sum(axes),
    "reduce_max": lambda a, axes, **_: a.amax(axes),
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "reduce_window_max": _pool,
}
"""The operations of JAX that its models use."""


def _whole_names(variables: Any) -> dict[str, str]:
    """The names of all variables, by those of the specifications: without collections, and blocks by their groups."""
    from flax import traverse_util

    whole = ["/".join(path) for path in traverse_util.flatten_dict(variables)]
    layers = sorted({int(name.split("/")[1][7:]) for name in whole if name.split("/")[1].startswith("layers_")})
    found = {}
    for name in whole:
        short = name.partition("/")[2]
        layer, _, rest = short.partition("/")
        if layer.startswith("layers_") and len(layers) > 2:  # jax-resnet: a stem, bottlenecks by stages, a dense layer
            number = layers.index(int(layer[7:])) - 1
            starts = (0, 3, 7, 13, 16)
            if 0 <= number < starts[-1]:
                stage = max(k for k, start in enumerate(starts) if start <= number)
                short = f"blockgroups_{stage}/blocks_{number - starts[stage]}/{rest}"
            elif number == starts[-1]:
                short = f"dense/{rest}"
        found[short] = name
    return found


def _flat(variables: Any) -> dict[str, Any]:
    from flax import traverse_util

    flat = {"/".join(path): value for path, value in traverse_util.flatten_dict(variables).items()}
    return {short: flat[name] for short, name in _whole_names(variables).items()}


def _nested(flat: Mapping[str, Any]) -> Any:
    from flax import traverse_util

    return traverse_util.unflatten_dict({tuple(name.split("/")): value for name, value in flat.items()})


def _to_torch(params: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: v if isinstance(v, Tensor) else torch.from_numpy(v.__array__().copy()) for n, v in params.items()}


def _double(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in params.items()}


def _short(groups: Iterable[frozenset[tuple[str, int]]]) -> str:
    first = sorted(sorted(groups, key=sorted)[0])
    return f"{first[:4]} and {max(len(first) - 4, 0)} more axes as one group"


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
