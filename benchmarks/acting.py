"""Speed of applying an element: many small networks in one gather, and one large network tensor by tensor.

    .venv/bin/python benchmarks/acting.py

The reference is a copy of the same tensors, because no method that moves values can be faster. Seconds are the minimum
over several runs on one thread.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.nets.mlp import mlp


def best(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def copied(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in params.items()}


def row(what: str, count: int, seconds: float, floor: float) -> str:
    return f"| {what} | {count / 1e6:.1f} | {seconds * 1e3:.1f} | {count / seconds / 1e6:.0f} | {seconds / floor:.1f} |"


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| what | million parameters | ms | million parameters per second | times a copy |")
    print("| --- | --- | --- | --- | --- |")

    small = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    symmetry = rg.discover(small, (torch.randn(4, 2),))
    models = 1000
    population = {name: torch.randn((models, *t.shape), generator=generator) for name, t in small.state_dict().items()}
    count = sum(t.numel() for t in population.values())
    floor = best(lambda: copied(population), 20)
    elements = symmetry.random(generator, batch=(models,))
    compiled = symmetry.compile(elements)
    print(
        row(
            "1,000 MLPs 2-32-32-1, each its own element, compiled", count, best(lambda: compiled(population), 20), floor
        )
    )
    direct = best(lambda: symmetry.act(elements, population), 20)
    print(row("the same, not compiled", count, direct, floor))
    single = symmetry.random(generator)
    print(row("the same, one element for all", count, best(lambda: symmetry.act(single, population), 20), floor))

    large = mlp(4096, 4096, 4096, 4096, 1000)
    symmetry = rg.discover(large, (torch.randn(2, 4096),), verify=False)
    params = {name: t.detach() for name, t in large.state_dict().items()}
    count = sum(t.numel() for t in params.values())
    floor = best(lambda: copied(params), 5)
    element = symmetry.random(generator)
    print(
        row("MLP 4096-4096-4096-4096-1000, new tensors", count, best(lambda: symmetry.act(element, params), 5), floor)
    )
    print(row("the same, in place", count, best(lambda: symmetry.act_(element, params), 5), floor))


if __name__ == "__main__":
    main()
