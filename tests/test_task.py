"""A task runs parameters in evaluation mode and averages its loss over examples."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.nets.mlp import mlp


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in (5, 2, 7)]


def test_the_mean_is_over_examples_not_over_batches() -> None:
    module = network()
    values = rg.Task(module, batches()).evaluate(module.state_dict())
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    outputs = module.eval()(inputs).detach()
    assert values["loss"] == pytest.approx(float(functional.cross_entropy(outputs, targets)), rel=1e-5)
    assert values["accuracy"] == pytest.approx(float((outputs.argmax(-1) == targets).double().mean()), abs=1e-9)


def test_the_module_is_left_as_it_was() -> None:
    module = network()
    module[3].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rg.Task(module, batches()).evaluate({name: tensor + 1 for name, tensor in before.items()})
    assert [layer.training for layer in module] == [True, True, True, False, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_other_criteria_have_no_accuracy() -> None:
    module = nn.Linear(4, 1)
    data = [(x, x.sum(-1, keepdim=True)) for x, _ in batches()]
    values = rg.Task(module, data, functional.mse_loss).evaluate(module.state_dict())
    assert values.keys() == {"loss"}


def test_the_loss_is_differentiable_and_vectorizes() -> None:
    task = rg.Task(network(), batches())
    params = {name: tensor.detach() for name, tensor in network().state_dict().items()}
    population = {name: torch.stack([tensor, tensor + 0.1 * (tensor + 1)]) for name, tensor in params.items()}
    batch = batches()[0]
    losses = torch.func.vmap(lambda p: task.loss(p, batch))(population)
    assert float(losses[0]) == pytest.approx(float(task.loss(params, batch)), rel=1e-5)
    weight = params["4.weight"].requires_grad_()
    task.loss(params, batches()[0]).backward()
    assert weight.grad is not None
    assert bool(weight.grad.any())


def test_inputs_by_position_and_by_name() -> None:
    module = nn.Bilinear(3, 3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    task = rg.Task(module, [])
    params = module.state_dict()
    assert torch.equal(
        task.run(params, (x, y)), torch.func.functional_call(module, params, (), {"input1": x, "input2": y})
    )
    assert torch.equal(task.run(params, (x, y)), task.run(params, {"input1": x, "input2": y}))


def test_classes_along_a_sequence_and_targets_that_do_not_count() -> None:
    module = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 5))
    tokens = torch.randint(5, (3, 7), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    values = rg.Task(module, [(tokens, targets), (tokens[:1], targets[:1])]).evaluate(module.state_dict())
    logits = module(torch.cat([tokens, tokens[:1]]))[:, :-1].detach()
    kept = torch.cat([targets, targets[:1]])[:, :-1]
    assert values["loss"] == pytest.approx(float(functional.cross_entropy(logits.flatten(0, 1), kept.flatten())))
    assert values["accuracy"] == pytest.approx(float((logits.argmax(-1) == kept).double().mean()))


class Two(nn.Module):
    """Returns two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x, "logits": self.layer(x)}


def test_halfway_between_two() -> None:
    module = nn.Linear(4, 3)
    a, b = ({name: torch.full_like(t, k) for name, t in module.state_dict().items()} for k in (1.0, 3.0))
    task = rg.Task(module, batches())
    middle = {name: torch.full_like(t, 2.0) for name, t in a.items()}
    assert task.midpoint_loss(a, b) == pytest.approx(task.evaluate(middle)["loss"])
    prepared = rg.Task(module, batches(), prepare=lambda params: {name: 0 * t for name, t in params.items()})
    assert prepared.midpoint_loss(a, b) == pytest.approx(math.log(3))


def test_the_output_that_counts() -> None:
    module, data = Two(), batches()
    chosen = rg.Task(module, data, outputs="logits").evaluate(module.state_dict())
    plain = rg.Task(module.layer, data).evaluate(module.layer.state_dict())
    assert chosen == plain


def test_batches_that_can_be_read_once() -> None:
    with pytest.raises(ValueError, match="can be read only once; give a list"):
        rg.Task(network(), iter(batches()))


def test_no_batches() -> None:
    with pytest.raises(ValueError, match="no batches to evaluate on"):
        rg.Task(network(), []).evaluate(network().state_dict())


@pytest.mark.parametrize("module", [mlp(16, 5, 3), nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten(), nn.Linear(2, 3))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_that_do_not_fit_are_named(module: nn.Module, dtype: torch.dtype) -> None:
    inputs = torch.zeros(2, 16) if not isinstance(module, nn.Sequential) else torch.zeros(2, 1, 4, 4)
    task = rg.Task(module, [(inputs, torch.tensor([0, 1]))])
    params = {name: tensor.to(dtype) for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=f"the parameters are {str(dtype)[6:]} and the inputs float32, which"):
        task.evaluate(params)


def test_other_errors_of_the_module_are_its_own() -> None:
    task = rg.Task(mlp(16, 5, 3), [(torch.zeros(2, 15), torch.tensor([0, 1]))])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        task.evaluate(mlp(16, 5, 3).state_dict())


def examples(task: rg.Task) -> Tensor:
    return torch.cat([inputs for inputs, _ in task.batches])


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_a_split_has_every_example_once(share: float) -> None:
    task = rg.Task(network(), batches())
    first, second = task.split(share)
    count = round(share * 14) or 1
    assert (len(examples(first)), len(examples(second))) == (min(count, 13), 14 - min(count, 13))
    both = torch.cat([examples(first), examples(second)])
    assert torch.equal(both.sort(0).values, examples(task).sort(0).values)
    for part in (first, second):  # Targets stay with their inputs.
        known = {
            tuple(x.tolist()): int(y) for inputs, targets in task.batches for x, y in zip(inputs, targets, strict=True)
        }
        assert all(known[tuple(x.tolist())] == int(y) for xs, ys in part.batches for x, y in zip(xs, ys, strict=True))


def test_a_split_depends_on_the_seed_only() -> None:
    task = rg.Task(network(), batches())
    assert torch.equal(examples(task.split()[0]), examples(task.split()[0]))
    other = task.split(generator=torch.Generator().manual_seed(1))
    assert not torch.equal(examples(task.split()[0]), examples(other[0]))


def test_whole_batches_are_split_where_examples_cannot_be_told_apart() -> None:
    tokens = [({"ids": torch.full((2, 5), k), "mask": None}, torch.full((10,), k)) for k in range(4)]
    first, second = rg.Task(network(), tokens).split()
    assert sorted(int(y[0]) for part in (first, second) for _, y in part.batches) == [0, 1, 2, 3]
    assert [len(list(part.batches)) for part in (first, second)] == [2, 2]
    assert all(x["ids"].shape == (2, 5) for x, _ in first.batches)
    with pytest.raises(ValueError, match="1 batch that stays whole, which cannot be split"):
        rg.Task(network(), tokens[:1]).split()


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="1 batch of one example"):
        rg.Task(network(), [(torch.zeros(1, 4), torch.zeros(1).long())]).split()
    with pytest.raises(ValueError, match="share is 1"):
        rg.Task(network(), batches()).split(1)
