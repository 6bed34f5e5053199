"""Time that the handwritten backward passes and optimizers save in the training of populations.

Each case of `populations.py` is trained in three ways in every round. The first way is the library's default. The
second way has no handwritten backward passes: it uses `torch.func.vmap`, or for convolutions one network after another.
The third way uses only torch's fused optimizers.

    OMP_NUM_THREADS=1 python benchmarks/hand_written.py
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from populations import by_population, cases

from regauge.training.optimizers import stack_optimizer

CASES = (
    "30-16-16-2",
    "30-16-16-2, own settings",
    "784-10-10",
    "784-10-10, own settings",
    "SIREN 2-32-32-1",
    "CNN of width 16, stride 2, 28 x 28 gray",
)
ROUNDS = 5


@contextmanager
def way(name: str) -> Iterator[None]:
    """Train in one of the ways within a context."""
    if name == "no chains":
        patch = mock.patch("regauge.zoo.training.trainer.chain_of", return_value=None)
    elif name == "fused":
        patch = mock.patch("regauge.training.stacks.stack_optimizer", partial(stack_optimizer, is_fused=True))
    else:
        patch = mock.patch.dict({})
    with patch:
        yield


def main() -> None:
    torch.set_num_threads(1)
    print("| networks | by hand, ms per step | no backward passes by hand / by hand | fused optimizers / by hand |")
    print("| --- | --- | --- | --- |")
    for case in cases():
        if case.name not in CASES:
            continue
        if "CNN" in case.name:
            case = replace(case, config=replace(case.config, count=8, group=8))
        rounds = []
        for _ in range(ROUNDS + 1):  # the first one warms up
            times = []
            for name in ("by hand", "no chains", "fused"):
                with way(name):
                    times.append(by_population(case))
            rounds.append(times)
        hand = statistics.median(times[0] for times in rounds[1:])
        ratios = [statistics.median(times[k] / times[0] for times in rounds[1:]) for k in (1, 2)]
        print(f"| {case.name} | {1e3 * hand:.4f} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
