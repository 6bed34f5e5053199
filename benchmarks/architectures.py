"""Results of discovery for every architecture of the test list, as a Markdown table.

    .venv/bin/python benchmarks/architectures.py > docs/architectures.md

The models come from `tests/models.py`: small configurations with random weights, perturbed and verified in float64.
"""

import sys
import warnings
from pathlib import Path

import torch

import regauge as rg

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from models import CASES
from test_discover_models import summary

HEADER = """# What was found in which architecture

This page lists the symmetry groups that `rg.discover` found in each architecture. We built each architecture in a small
configuration with random weights. We verified every group in float64, after all parameters and buffers were perturbed
from initialization. The column of groups uses these names: `S16` is the group of all permutations of 16 units. `GL6` is
the group of all invertible 6 x 6 matrices. `O10` is the group of all rotations and reflections of 10 units. `SO2` is
the group of rotations of two units by an angle. `S8^4` is a product of four groups `S8`, one for each of 4 blocks
(heads, normalization groups, experts). `3xS16` means that there are three groups `S16`. The next three columns count
the independent [families](words.md) of positive scales, signs and half-period shifts, over all groups. The error is the
largest relative change of an output under a random element of the whole symmetry. An error of about 1e-7 is due to the
model, which rounds to float32 in its forward pass.

The command `.venv/bin/python benchmarks/architectures.py > docs/architectures.md` makes this page.

Each row is one configuration that the tests build. [The census](census.md) checks 754 families of published models. For
many families we also aligned and merged two folders, loaded the results again and compared them: see [folders of
transformers](interoperation.md#what-was-run).

| architecture | groups | scales | signs | shifts | frozen axes | error |
| --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    warnings.simplefilter("ignore")
    print(HEADER)
    for case in CASES:
        torch.manual_seed(0)
        module = case.module().eval()
        symmetry = rg.discover(module, case.inputs(), case.kwargs(), outputs=case.outputs, verify=False)
        check = symmetry.verify(
            module, case.inputs(), case.kwargs(), generator=torch.Generator().manual_seed(1), outputs=case.outputs
        )
        if not check.ok:
            raise SystemExit(f"{case.name}: {check}")
        groups, families = summary(symmetry)
        ordered = sorted(groups.items())
        text = " ".join(name if count == 1 else f"{count}x{name}" for name, count in ordered)
        numbers = " | ".join(str(families[key]) for key in ("scales", "signs", "shifts"))
        print(f"| {case.name} | {text} | {numbers} | {len(symmetry.frozen)} | {check.max_error:.0e} |", flush=True)


if __name__ == "__main__":
    main()
