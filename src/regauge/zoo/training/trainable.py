"""Which modules populations can be trained of, and what they are made of."""

import torch
from torch import Tensor, nn

from regauge.training.initialization import use_seed
from regauge.zoo.training.examples import Examples


def require_trainable(module: nn.Module, examples: Examples) -> None:
    """Refuse a module that no population can be trained of on these examples.

    Args:
        module: On the CPU; left in training mode.
        examples: In the dtype of the module.

    Raises:
        ValueError: The module ties parameters, draws random numbers while it is trained, or gives outputs that do not
            fit the targets.
    """
    names = [name for name, _ in module.named_parameters()]
    tied = sorted({name for name, _ in module.named_parameters(remove_duplicate=False)} - set(names))
    if tied:
        raise ValueError(f"{tied[:3]} are names of tensors with other names too; untie them to train a population")
    inputs = examples.inputs[:2].cpu()
    (first, draws), (second, _) = (_try(module, inputs, seed) for seed in (0, 1))
    # Other sources of chance than torch's global generator are only seen in what comes out.
    if draws or not torch.allclose(first, second, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"a {type(module).__name__} draws random numbers while it is trained, so that a network would depend on "
            "its neighbors; set the p of its dropout to 0, or take the chance out of its forward pass"
        )
    examples.require_outputs(first.shape[1])


def _try(module: nn.Module, inputs: Tensor, seed: int) -> tuple[Tensor, bool]:
    """What a module says in training mode, and whether it drew from torch's global generator; its buffers stay."""
    own = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    with use_seed(seed), torch.no_grad():
        before = torch.get_rng_state()
        outputs: object = torch.func.functional_call(module.train(), own, (inputs,))
        draws = not torch.equal(before, torch.get_rng_state())
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(inputs):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"a {type(module).__name__} gives {found} for {len(inputs)} examples, but [examples, out] is needed; wrap "
            "it in a module that gives that"
        )
    return outputs, draws
