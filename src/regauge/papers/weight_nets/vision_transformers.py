"""Generalization of small vision transformers, read off their weights modulo their whole symmetry."""

from dataclasses import replace

from regauge import learn
from regauge import weightspace as ws
from regauge.papers.experiment import Scale
from regauge.papers.weight_nets.accuracy import Study
from regauge.papers.weight_nets.readers import Mean, Net, Reader, Ridge, Trees
from regauge.zoo.presets import vit_architecture, vit_zoo


def config(scale: Scale) -> Study:
    """320 runs."""
    if scale == "smoke":
        architecture = vit_architecture(8, 4, width=8, heads=2)
        small = replace(vit_zoo(48), architecture=architecture, data="digits", steps=20, checkpoints=None)
        return Study("small ViTs", (("vit-zoo", small),), readers(0.2, width=8), splits=2)
    populations = (("vit-zoo", vit_zoo(320 if scale == "cpu" else 10_000)),)
    return Study("small vision transformers", populations, readers(40 if scale == "cpu" else 3600), 3)


def readers(seconds: float, width: int = 32) -> tuple[Reader, ...]:
    """Layers at the same budget of CPU seconds, with less of the symmetry too, and what stands beside them."""
    whole = learn.PredictorConfig(
        layer=ws.Propagation(),
        width=width,
        depth=3,
        seconds=seconds,
        is_cpu_time=True,
        kind="fractions",
        batch=32,
        epochs=200,
        statistics=False,
    )
    return (
        Net("propagation", whole),
        Net("message passing", replace(whole, layer=ws.MessagePassing())),
        Net("relational attention", replace(whole, layer=ws.RelationalAttention())),
        Net("propagation, permutations only", replace(whole, parts=("permutation",))),
        Net("the same, moved at random in training", replace(whole, parts=("permutation",), augment=("linear",))),
        Trees(),
        Ridge(),
        Mean(),
    )
