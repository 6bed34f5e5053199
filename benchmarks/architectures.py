"""Results of discovery for every architecture of the test list, as a Markdown table.

    .venv/bin/python benchmarks/architectures.py > docs/architectures.md

The models are those of `tests/models.py`: small configurations with random weights, perturbed and checked in float64.
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

Each architecture was built in a small configuration with random weights. Every group was verified in float64, with all
parameters and buffers moved away from initialization. In the column of groups, `S16` reorders 16 units, `GL6` contains
every invertible 6 x 6 matrix, `O10` every rotation, `SO2` an angle. `S8^4` has one independent copy in each of 4
blocks (heads, normalization groups, experts). The next three columns count the independent families of positive scales,
signs and half-period shifts, over all groups. The error is the largest relative change of an output under a random
element of the whole symmetry. If the error is about 1e-7, the model itself rounds to float32 inside.

Made by `.venv/bin/python benchmarks/architectures.py > docs/architectures.md`.

Each row is one configuration that the tests build. [The census](census.md) has 754 published families. Folders of many
families were also aligned, merged, loaded again and compared: see [folders of
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
