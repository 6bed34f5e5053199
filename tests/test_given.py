"""Arguments of callers are accepted if their meaning is clear. Otherwise, an error states what to write."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.gauging import audit, certify

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


A, B = network(0), network(1)
a, b = A.state_dict(), B.state_dict()
SYMMETRY = rg.discover(A, (X,))
TASK = rg.Task(A, [(X, Y)])


class Keywords(nn.Module):
    """A module that takes one mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(0)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.net(inputs["x"])
        return result


class Branching(Keywords):
    def forward(self, inputs: Any) -> Tensor:
        result: Tensor = self.net(inputs)
        if result.sum() > 3:  # the line that the error names
            result = 2 * result
        return result


@pytest.mark.parametrize("inputs", [(X,), [X], X, {"input": X}], ids=["tuple", "list", "tensor", "mapping"])
def test_example_inputs_may_come_in_every_plain_form(inputs: Any) -> None:
    assert rg.discover(A, inputs).to_json() == SYMMETRY.to_json()
    assert SYMMETRY.verify(A, inputs, generator=torch.Generator().manual_seed(0)).ok
    assert rg.discovery.nullity(A, inputs).unexplained == 0
    assert rg.discovery.fold(a, A, inputs).params.keys() == a.keys()
    assert rg.discovery.activations(A, inputs, SYMMETRY).read
    assert certify(a, [], A, inputs).exact == 0
    assert audit([], a, SYMMETRY, A, inputs) == []


def test_example_inputs_without_a_plain_meaning_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the text 'x'; write a tuple of positional inputs, as in \(x,\)"):
        rg.discover(A, "x")
    with pytest.raises(ValueError, match=r"write \(mapping,\) if the module takes it as one"):
        rg.discover(Keywords(), {"x": X})
    assert rg.discover(Keywords(), ({"x": X},)).groups


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ((A, (X,)), r"a tuple of 2, but a torch.nn.Module is expected; its first entry is one: unpack it"),
        (Keywords, r"the class Keywords, but a torch.nn.Module is expected; write Keywords\(...\)"),
        (a, r"an OrderedDict, but a torch.nn.Module is expected$"),
    ],
    ids=["a factory's pair", "a class", "parameters"],
)
def test_a_model_that_is_no_module_is_refused(model: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=f"the model is {sentence}"):
        rg.discover(model, X)


def test_a_distributed_model_is_refused_for_the_module_in_it(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(rg.discovery.TraceError, match=r"give the wrapped module, `ddp.module`"):
            rg.discover(nn.parallel.DistributedDataParallel(network(0)), X)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_cannot_be_traced_is_told_its_line() -> None:
    lines = Path(__file__).read_text().splitlines()
    number = next(k for k, line in enumerate(lines, 1) if "# the line that the error names" in line)
    with pytest.raises(rg.TraceError, match=rf"{re.escape(__file__)}, line {number}: if result.sum\(\) > 3"):
        rg.discover(Branching(), X)


NETWORKS: list[tuple[str, Callable[[Any], Any]]] = [
    ("align", lambda p: rg.align(p, b, SYMMETRY)),
    ("align, second", lambda p: rg.align(a, p, SYMMETRY)),
    ("align_many", lambda p: rg.align_many([a, p], SYMMETRY)),
    ("merge", lambda p: rg.merge([p, b], SYMMETRY)),
    ("base", lambda p: rg.merge([a, b], SYMMETRY, base=p, rule=rg.merging.TaskArithmetic())),
    ("line", lambda p: rg.line(p, b, TASK, points=3)),
    ("plane", lambda p: rg.connect.plane(a, network(2).state_dict(), p, TASK, resolution=2)),
    ("repair", lambda p: rg.repair(p, A, [a, b], TASK.batches)),
    ("endpoints", lambda p: rg.repair(a, A, [a, p], TASK.batches)),
    ("reset", lambda p: rg.connect.reset_batchnorm(p, A, TASK.batches)),
    ("canonicalize", lambda p: rg.canonicalize(p, SYMMETRY)),
    ("act", lambda p: SYMMETRY.act(SYMMETRY.identity(), p)),
    ("fold", lambda p: rg.discovery.fold(p, A, X)),
]
EVERY_FUNCTION = pytest.mark.parametrize("run", [run for _, run in NETWORKS], ids=[name for name, _ in NETWORKS])


@EVERY_FUNCTION
def test_what_is_no_dictionary_of_tensors_is_refused_in_a_sentence(run: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"is a Sequential, but .*: write module.state_dict\(\)"):
        run(A)
    with pytest.raises(TypeError, match="training checkpoint: give its entry 'model'"):
        run({"epoch": 3, "model": a})
    with pytest.raises(TypeError, match="but a network is a dictionary from names to tensors"):
        run(SYMMETRY)


@EVERY_FUNCTION
def test_parameters_that_require_grad_are_taken_without_a_warning(run: Callable[[Any], Any]) -> None:
    run(dict(B.named_parameters()))  # warnings are errors


def test_results_do_not_require_grad() -> None:
    given = [dict(module.named_parameters()) for module in (A, B)]
    for params in (rg.align(*given, SYMMETRY).params, rg.merge(given, SYMMETRY).params):
        assert not any(tensor.requires_grad for tensor in params.values())


@pytest.mark.parametrize("name", ["align", "merge", "line", "canonicalize", "repair"])
def test_tensors_without_values_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is on the meta device, where tensors have no values"):
        dict(NETWORKS)[name]({key: tensor.to("meta") for key, tensor in a.items()})


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"method": "sinkhorn"}, r"write method=regauge.Sinkhorn\(\)"),
        ({"method": rg.WeightMatching}, r"not an object of it: write method=WeightMatching\(\)"),
        ({"method": 3}, "method is an int, but a Method is expected"),
        ({"rule": "ties"}, r"write rule=regauge.merging.Ties\(\)"),
        ({"rule": rg.merging.Ties}, r"write rule=Ties\(\)"),
    ],
)
def test_names_and_classes_for_objects_are_refused(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        rg.merge([a, b], SYMMETRY, **setting)
    if "method" in setting:
        with pytest.raises(TypeError, match=sentence):
            rg.align(a, b, SYMMETRY, **setting)


@pytest.mark.parametrize("given", [a, "a.safetensors", A])
def test_one_network_for_several_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"give a list of them: \[params_a, params_b\]"):
        rg.merge(given, SYMMETRY)


@pytest.mark.parametrize("run", [rg.merge, rg.align_many])
def test_networks_that_are_arguments_of_their_own_are_refused(run: Any) -> None:
    with pytest.raises(TypeError, match=r"3 positional arguments .* write them as a list, \[params_a, params_b\]"):
        run(a, b, SYMMETRY)


@pytest.mark.parametrize("batches", [[X], (X, Y), X, [(X, Y, Y)], {"x": X}])
def test_a_task_wants_pairs(batches: Any) -> None:
    with pytest.raises(TypeError, match=r"give a list of batches|\(\(first, second\), targets\)"):
        rg.Task(A, batches)


def test_a_loader_without_targets_is_refused_where_it_is_read() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=3)
    with pytest.raises(TypeError, match="a batch of the task is a list of 1"):
        rg.Task(A, loader).evaluate(a)
    with pytest.raises(TypeError, match="a batch of the task is a list of 1"):
        rg.align(a, b, SYMMETRY, task=rg.Task(A, loader))


def test_batches_mean_the_same_with_and_without_targets() -> None:
    middle = rg.connect.interpolate(a, b, 0.5)
    forms: list[list[Any]] = [[X], [(X, Y)], [[X]], [{"input": X}], [((X,), None)]]
    first, *others = (rg.repair(middle, A, [a, b], batches).params for batches in forms)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    normalized = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    first, *others = (rg.connect.reset_batchnorm(normalized.state_dict(), normalized, batches) for batches in forms)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    with pytest.raises(TypeError, match="a batch is a tuple of 3"):
        rg.repair(middle, A, [a, b], [(X, X, X)])


def test_what_is_shown_on_a_line_is_short() -> None:
    aligned, merged = rg.align(a, b, SYMMETRY, task=TASK), rg.merge([a, b], SYMMETRY)
    shown = [
        *(SYMMETRY, SYMMETRY.groups[0], SYMMETRY.identity(), TASK, aligned, merged, rg.align_many([a, b], SYMMETRY)),
        *(rg.line(a, b, TASK), rg.connect.plane(a, b, {k: t + 1 for k, t in a.items()}, TASK, resolution=2)),
        *(rg.repair(a, A, [a, b], [X]), rg.alignment.correspond(a, b, SYMMETRY, SYMMETRY)),
    ]
    assert {type(one).__name__: len(repr(one)) for one in shown if len(repr(one)) > 400} == {}
    assert repr(SYMMETRY) == "Symmetry(2 groups: 0 (scaled, 5), 2 (signed, 5))"
    assert repr(rg.discover(nn.Linear(4, 3), X)) == "Symmetry(0 groups)"


def test_a_symmetry_written_by_hand_tells_no_numbers_that_it_does_not_know() -> None:
    text = str(rg.Symmetry.from_axes({"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}))
    assert "10^" not in text
    assert "1 group, sizes are not known yet" in text


def test_the_order_of_a_group_is_a_vector_and_a_matrix() -> None:
    element = SYMMETRY.random(torch.Generator().manual_seed(3), parts=("permutation",), batch=(2,))
    moved = SYMMETRY.act(element.item(1), a)
    vector, matrix = element.item(1).order("0"), element.item(1).order_matrix("0")
    assert torch.equal(moved["0.bias"], a["0.bias"][vector])
    assert torch.equal(moved["0.bias"], (matrix @ a["0.bias"].double()).float())
    assert element.order_matrix("0").shape == (2, 5, 5)
    with pytest.raises(KeyError, match="there is no group 'x'; the groups are"):
        element.order("x")
    linear = rg.discover(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), X)
    with pytest.raises(ValueError, match="does not reorder its units"):
        linear.identity().order(linear.groups[0].name)


def test_alignments_are_saved_and_loaded(tmp_path: Any) -> None:
    aligned = rg.align(a, b, SYMMETRY)
    loaded = rg.checkpoints.load_alignment(aligned.save(tmp_path / "b.alignment.safetensors"))
    moved = loaded.symmetry.act(loaded.element, b)
    assert all(torch.equal(moved[name], aligned.params[name]) for name in b)
    with pytest.raises(FileExistsError):
        aligned.save(tmp_path / "b.alignment.safetensors")


WRITE_SYMMETRY = r"write symmetry = regauge.discover\(module, example_inputs\)"
WRITE_TASK = r"write regauge.Task\(module, \[\(inputs, targets\), ...\]\)"
WRITE_GENERATOR = r"write generator=torch.Generator\(\).manual_seed"
anything: Any = rg
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no symmetry, align": (lambda: anything.align(a, b), rf"align\(\) is missing 'symmetry'; {WRITE_SYMMETRY}"),
    "no symmetry, compare": (lambda: anything.compare(a, b), rf"compare\(\) is missing 'symmetry'; {WRITE_SYMMETRY}"),
    "no symmetry, merge": (lambda: anything.merge([a, b]), "is missing 'symmetry'"),
    "no inputs": (lambda: anything.discover(A), "is missing 'example_inputs'; write a tuple of inputs"),
    "no judge": (lambda: anything.line(a, b), rf"is missing 'judge'; {WRITE_TASK}"),
    "a module for the symmetry": (lambda: anything.align(a, b, A), f"the symmetry is a Sequential, .*{WRITE_SYMMETRY}"),
    "a path for the symmetry": (lambda: anything.canonicalize(a, "s.json"), "read a file of one with .*from_json"),
    "a result for the symmetry": (lambda: anything.align(a, b, rg.align(a, b, SYMMETRY)), "write .symmetry behind it"),
    "a module for the task": (
        lambda: anything.align(a, b, SYMMETRY, task=A),
        f"the task is a Sequential, .*{WRITE_TASK}",
    ),
    "a module for the judge": (lambda: anything.line(a, b, A), f"the judge is a Sequential, .*{WRITE_TASK}"),
    "a judge of numbers": (lambda: anything.line(a, b, lambda p: 1.0), r"returned a float; .* as in {'loss': 0.1}"),
    "a seed, align": (lambda: anything.align(a, b, SYMMETRY, generator=7), rf"is an int, .*{WRITE_GENERATOR}\(7\)"),
    "a seed, random": (lambda: SYMMETRY.random(anything and 0), rf"is an int, .*{WRITE_GENERATOR}\(0\)"),
    "a seed, verify": (lambda: SYMMETRY.verify(A, (X,), generator=anything and 0), rf"is an int, .*{WRITE_GENERATOR}"),
    "a module for parameters": (lambda: TASK.evaluate(anything and A), r"write module.state_dict\(\)"),
    "parameters for the module": (
        lambda: anything.repair(a, a, [a, b], [X]),
        "the model is an OrderedDict, but a torch",
    ),
    "a task of parameters": (lambda: rg.Task(anything and a, [(X, Y)]), "the model is an OrderedDict, but a torch"),
    "parameters for an alignment": (
        lambda: anything.save_alignment(a, "x"),
        "the result of `regauge.align` is expected",
    ),
    "an unknown name": (lambda: anything.align(a, b, SYMMETRY, generater=0), "unexpected keyword argument 'generater'"),
}


@pytest.mark.parametrize(("run", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_typical_mistakes_are_answered_by_what_to_write(run: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        run()


def test_arguments_keep_their_names_of_earlier_versions() -> None:
    assert anything.gauging.certify(a, [], A, inputs=(X,)).exact == 0


def test_a_module_before_the_networks_is_told_its_place() -> None:
    """In earlier versions, the module was the first argument in `bayes`."""
    with pytest.raises(TypeError, match=r"networks come before it: write predict\(posterior, module, batches\)"):
        anything.bayes.predict(A, a, [X])


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (Y.float(), r"targets of shape \(6,\) and torch.float32, from 0 to 2, do not fit"),
        (Y + 1, r"from 1 to 3, do not fit .* an integer from 0 to 2"),
        (torch.eye(3)[Y].long(), r"targets of shape \(6, 3\) .* one class for each row"),
    ],
    ids=["floats", "out of range", "one-hot"],
)
def test_targets_that_are_no_classes_are_refused(targets: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rg.Task(A, [(X, targets)]).evaluate(a)


@pytest.mark.parametrize("prefix", ["module.", "model.net."])
def test_names_that_all_begin_alike_are_told(prefix: str) -> None:
    plain = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    wrapped = {prefix + name: tensor for name, tensor in plain.items()}
    for networks, which in (((plain, wrapped), "second"), ((wrapped, plain), "first")):
        with pytest.raises(ValueError, match=f"all names of the {which} begin with '{prefix}': leave it out"):
            rg.connect.interpolate(*networks, 0.5)
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.connect.interpolate(plain, {prefix + "0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, 0.5)


def test_batches_may_lack_targets_where_the_criterion_reads_none() -> None:
    with pytest.raises(ValueError, match=r"the targets of a batch are None, .* a criterion that reads outputs alone"):
        rg.Task(A, [(X, None)]).evaluate(a)
    task = rg.Task(A, [(X, None), (X[:2], None)], lambda outputs, _: outputs.square().mean())
    with torch.no_grad():
        expected = (6 * A(X).square().mean() + 2 * A(X[:2]).square().mean()) / 8
    assert task.evaluate(a)["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert rg.line(a, b, task, points=3).barrier >= 0
