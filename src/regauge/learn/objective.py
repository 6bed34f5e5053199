"""The objective of autoencoders: decoded networks should reproduce the outputs of the encoded networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.devices import to_device
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.learn.function_losses import Criterion, FunctionLoss, SquaredError
from regauge.learn.running import Runner, count_examples, take_examples


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss between the functions of two networks, on fixed inputs.

    Attributes:
        runner: The object that evaluates networks.
        batches: Inputs and their targets. Among the losses, only `Criterion` uses the targets.
        loss: The loss between outputs.
        examples: The number of inputs that each training step samples; None for all inputs of a batch.
        mean: The mean outputs of some networks, for each batch.
        scale: The number by which training losses are divided: the squared error of mean outputs as a prediction of all
            outputs.
        accuracy: The median accuracy of some networks; None if targets are not class labels.
    """

    runner: Runner
    batches: tuple[tuple[Any, Any], ...]
    loss: FunctionLoss | Criterion
    examples: int | None = None
    mean: tuple[Tensor, ...] = ()
    scale: float = 1.0
    accuracy: float | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module | None,
        inputs: Any,
        task: Task | None,
        loss: FunctionLoss | None,
        examples: int | None,
        sample: Params,
        device: str,
    ) -> "Objective":
        """Return the objective for the given settings, with the statistics of some networks.

        Raises:
            ValueError: The networks cannot be evaluated on the inputs, or all networks compute the same function. The
                error is also raised if the loss cannot compare the networks' outputs.
        """
        if task is None:
            assert module is not None
            if inputs is None:
                raise ValueError("decoded networks are compared by their outputs; give `inputs`, or a `task`")
            task, batches = Task(module, ()), [(inputs, None)]
        else:
            batches = list(task.batches)
        if not batches:
            raise ValueError("the task has no batches to compare networks on; give at least one")
        task.module.to(device)
        like = next(t for t in sample.values() if t.is_floating_point())
        used = tuple((_to_dtype(to_device(x, device), like.dtype), to_device(y, device)) for x, y in batches)
        chosen = loss or (SquaredError() if inputs is not None or task.batches == () else Criterion(task))
        made = cls(Runner(task), used, chosen, examples)
        return made._standardize(sample)

    def train_loss(self, decoded: Params, originals: Params, chance: torch.Generator) -> Tensor:
        """Return the mean loss of networks on a sample of the inputs."""
        number = int(torch.randint(len(self.batches), (), generator=chance)) if len(self.batches) > 1 else 0
        inputs, targets = self.batches[number]
        count = count_examples(inputs)
        if self.examples is not None and self.examples < count:
            index = torch.randperm(count, generator=chance)[: self.examples]
            inputs, targets = take_examples(inputs, index), take_examples(targets, index)
        wanted = None
        if not isinstance(self.loss, Criterion):
            with torch.no_grad():
                wanted = self.runner.outputs(originals, inputs)
        return self.runner.losses(decoded, inputs, self._judge(wanted, targets)).mean() / self.scale

    def sampled(self, steps: int, chance: torch.Generator) -> "Objective":
        """Return the objective on a random sample of the inputs. The sample contains at most as many inputs as `steps`
        training steps use.
        """
        chosen = torch.randperm(len(self.batches), generator=chance)[:steps].sort().values.tolist()
        batches, mean = list[tuple[Any, Any]](), list[Tensor]()
        for k in chosen:
            (inputs, targets), outputs = self.batches[k], self.mean[k]
            count = count_examples(inputs)
            most = count if self.examples is None else self.examples * (steps // len(chosen))
            if most < count:
                index = torch.randperm(count, generator=chance)[:most]
                inputs, targets = take_examples(inputs, index), take_examples(targets, index)
                outputs = outputs[index.to(outputs.device)]
            batches.append((inputs, targets))
            mean.append(outputs)
        return replace(self, batches=tuple(batches), mean=tuple(mean))

    @torch.no_grad()
    def measure(
        self, decoded: Params | None, originals: Params, known: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return scores of every network, float64 `[models]`.

        If `decoded` is None, the mean outputs replace the outputs of decoded networks.

        The scores are the loss, the squared error of the outputs, and for classifiers the share of examples with the
        same predicted class. If the targets are class labels that the loss does not use, a further score is the
        difference between the accuracies of decoded and original networks. Mean outputs have no meaningful accuracy, so
        the median accuracy of some networks replaces it. `known` contains the outputs of the original networks for each
        batch, if these outputs have been computed already.
        """
        totals: dict[str, Tensor] = {}
        whole = sum(count_examples(inputs) for inputs, _ in self.batches)
        for k, (inputs, targets) in enumerate(self.batches):
            wanted = self.runner.outputs(originals, inputs) if known is None else known[k]
            made = self.mean[k].expand_as(wanted) if decoded is None else self.runner.outputs(decoded, inputs)
            scores = {"loss": self.loss(made, wanted, targets)}
            scores["squared error"] = SquaredError()(made, wanted, None)
            if not isinstance(self.loss, SquaredError) and made.ndim > 2 and made.shape[-1] > 1:
                scores["agreement"] = (made.argmax(-1) == wanted.argmax(-1)).double().flatten(1).mean(1)
            own = self._accuracies(wanted, targets)
            other = self._accuracies(made, targets)
            if decoded is None and own is not None:
                other = None if self.accuracy is None else torch.full_like(own, self.accuracy)
            if own is not None and other is not None:
                scores |= {"own": own, "made": other}
            share = count_examples(inputs) / whole
            for name, values in scores.items():
                totals[name] = totals.get(name, 0) + share * values.double()
        if "own" in totals:
            totals["accuracy error"] = (totals.pop("made") - totals.pop("own")).abs()
        return totals

    def _accuracies(self, outputs: Tensor, targets: Any) -> Tensor | None:
        """Return the accuracy of each network; None without class labels, or if the loss already uses the targets."""
        is_class = isinstance(targets, Tensor) and not targets.is_floating_point()
        if isinstance(self.loss, Criterion) or not is_class or outputs.shape[1:-1] != targets.shape:
            return None
        right: Tensor = (outputs.argmax(-1) == targets).double().flatten(1).mean(1)
        return right

    def _judge(self, wanted: Tensor | None, targets: Any) -> Any:
        def judge(made: Tensor, part: slice) -> Tensor:
            return self.loss(made, made if wanted is None else wanted[part], targets)

        return judge

    def _standardize(self, sample: Params) -> "Objective":
        try:
            with torch.no_grad():
                outputs = [self.runner.outputs(sample, inputs) for inputs, _ in self.batches]
        except (RuntimeError, TypeError, IndexError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"the networks cannot be run on the inputs ({reason}); give inputs for their module"
            ) from error
        mean = tuple(made.mean(0) for made in outputs)
        result = replace(self, mean=mean)
        scores = result.measure(None, sample, outputs)
        spread = float(scores["squared error"].mean())
        if not 0 < spread < float("inf"):
            raise ValueError(
                f"the outputs of these networks at the inputs have the variance {spread}; give inputs at which outputs "
                "differ, and networks whose outputs are finite"
            )
        right = [self._accuracies(made, targets) for made, (_, targets) in zip(outputs, self.batches, strict=True)]
        known = [one for one in right if one is not None]
        if len(known) == len(right):
            counts = torch.tensor([count_examples(inputs) for inputs, _ in self.batches]).double()
            whole = torch.stack(known).cpu().T @ counts / counts.sum()
            result = replace(result, accuracy=float(whole.median()))
        return replace(result, scale=spread) if isinstance(self.loss, SquaredError) else result


def _to_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Return inputs with floating-point tensors converted to a dtype."""
    if isinstance(inputs, Mapping):
        return {name: _to_dtype(value, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_to_dtype(value, dtype) for value in inputs)
    return inputs.to(dtype) if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs
