"""Every method of `regauge gauge` on folders of many families, as a Markdown table.

    .venv/bin/python benchmarks/gauges.py [FAMILY ... | cnns] > gauges.md

The models come from `tests/folder_cases.py`: tiny configurations with random weights, which transformers saves. The
command line transforms the folders. Afterwards, transformers loads them again, and must find exactly the expected
parameters.
"""

import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from folder_cases import DENSE, LOOPS, MIXTURES, FolderCase, first_tensor
from models import CASES as MODELS

import regauge as rg
from regauge.cli.main import main as regauge
from regauge.core.probe import perturb
from regauge.hub.example_inputs import example_inputs, with_masks

HEADER = """| family | rotated, by kind | equalized | Hadamard | learned | float32, transformers |
| --- | --- | --- | --- | --- | --- |"""
METHODS: dict[str, list[str]] = {
    "equalize": ["--method", "equalize"],
    "hadamard": ["--method", "hadamard"],
    "learned": ["--method", "learned", "--steps", "5"],
}


CNNS = (
    *("cnn_flatten", "vgg16_batch", "grouped_conv", "depthwise_conv", "depthwise_multiplier", "shuffle_unit"),
    *("squeeze_excite", "pixel_shuffle", "resnet20_batch_B", "resnet20_group_A", "convnext", "mobilenet_v2"),
)
"""The convolutional models, from `tests/models.py`."""


def main(names: list[str]) -> None:
    if names == ["cnns"]:
        convolutional()
        return
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(HEADER, flush=True)
    for name, case in {**DENSE, **MIXTURES, **LOOPS}.items():
        if not names or name in names:
            print(row(name, case), flush=True)


def row(name: str, case: FolderCase) -> str:
    """Return the certificates of a family, and the largest change of the outputs that transformers computes in
    float32.
    """
    cells, kinds, loaded = [], "", 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        model = case.save(folder, 0)
        for method, options in METHODS.items():
            out = Path(place, method)
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
                    regauge(["gauge", str(folder), "-o", str(out), *options])
            except SystemExit:
                cells.append(f"refused: {told.getvalue().strip().splitlines()[-1][:160]}")
                continue
            facts = json.loads((out / "regauge.gauge.json").read_text())
            found = facts["certificate"]
            cells.append("not run" if found is None else f"{found['exact']:.0e}{'' if found['ok'] else ' WRONG'}")
            if method == "hadamard":
                counts: dict[str, int] = {}
                for group in facts["rotated"]:
                    counts[group["kind"]] = counts.get(group["kind"], 0) + 1
                kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
            loaded = max(loaded, change(model, case, out))
    return f"| {name} | {kinds} | {' | '.join(cells)} | {loaded:.0e} |"


def convolutional() -> None:
    """Return the certificates of convolutional networks."""
    warnings.simplefilter("ignore")
    print("| network | equalized | smoothed |\n| --- | --- | --- |")
    cases = {case.name: case for case in MODELS}
    for case in (cases[name] for name in CNNS):
        torch.manual_seed(0)
        module, generator = case.module().eval(), torch.Generator().manual_seed(0)
        buffers = {name for name, _ in module.named_buffers()}
        params = perturb({n: t.detach() for n, t in module.state_dict().items()}, buffers, generator)
        inputs = case.inputs()
        symmetry = rg.discover(module, inputs, case.kwargs(), outputs=case.outputs)
        task = rg.Task(module, [(tuple(inputs), torch.zeros(1))], outputs=case.outputs)
        cells = []
        for method in (rg.Equalize(), rg.gauging.Smooth(grid=2)):
            found = rg.gauge(params, symmetry, method=method, task=task).certificate
            assert found is not None
            cells.append(f"{found.exact:.0e}{'' if found.ok else ' WRONG'}")
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def change(model: Any, case: FolderCase, out: Path) -> float:
    """Return the difference between the outputs of a folder and of the original model, both computed by
    transformers.
    """
    moved, report = getattr(transformers, case.model).from_pretrained(out, output_loading_info=True)
    if any(report.values()):
        raise ValueError(f"{out}: {report}")
    moved.eval()
    torch.manual_seed(0)
    kwargs = with_masks(model, next(example_inputs(model, model.config)))
    with torch.no_grad():
        before, after = (first_tensor(one(**kwargs)) for one in (model, moved))
    return float((before - after).abs().max() / before.abs().max())


if __name__ == "__main__":
    main(sys.argv[1:])
