"""Generalization of small vision transformers, read off their weights modulo their whole symmetry."""

from dataclasses import replace

from regauge import weightspace as ws
from regauge.papers.experiment import Scale
from regauge.papers.weight_nets.accuracy import Study
from regauge.papers.weight_nets.readers import STATISTICS, Mean, Net, Reader, Together, net_config
from regauge.zoo.presets import vit_architecture, vit_zoo


def config(scale: Scale) -> Study:
    """300 runs; as many as the paper's CNNs at the paper's scale."""
    if scale == "smoke":
        architecture = vit_architecture(8, 4, width=8, heads=2)
        small = replace(vit_zoo(32), architecture=architecture, data="digits", steps=10)
        return Study("small ViTs", (("vit-zoo", small),), readers(0.2, width=8), splits=2)
    populations = (("vit-zoo", vit_zoo(300 if scale == "cpu" else 10_000)),)
    return Study("small vision transformers", populations, readers(8 if scale == "cpu" else 3600), 3)


def readers(seconds: float, width: int = 16) -> tuple[Reader | Together, ...]:
    """Layers at the same budget of CPU seconds, with less of the symmetry too, and what stands beside them."""
    whole = net_config(ws.Propagation(), seconds, width)
    nets = (
        Net("propagation", whole),
        Net("message passing", replace(whole, layer=ws.MessagePassing())),
        Net("relational attention", replace(whole, layer=ws.RelationalAttention())),
    )
    return (
        *nets,
        Together("all of these, mean", nets),
        Net("propagation, without moments", replace(whole, reads_moments=False)),
        Net("propagation, permutations only", replace(whole, parts=("permutation",))),
        *STATISTICS,
        Together("all layers and the trees, mean", (*nets, STATISTICS[0])),
        Mean(),
    )
