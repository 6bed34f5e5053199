"""Generalization of small vision transformers, predicted from weights modulo their whole symmetry."""

from dataclasses import replace

from regauge import weightspace as ws
from regauge.zoo.presets import vit_architecture, vit_zoo
from regauge_papers.experiment import Scale
from regauge_papers.weight_nets.accuracy import Study
from regauge_papers.weight_nets.readers import STATISTICS, Mean, Net, Reader, Together, net_config


def config(scale: Scale) -> Study:
    """Return the settings: 300 runs, or as many runs as in the experiment on CNNs at the paper's scale."""
    if scale == "smoke":
        architecture = vit_architecture(8, 4, width=8, heads=2)
        small = replace(vit_zoo(32), architecture=architecture, data="digits", steps=10)
        return Study("small ViTs", (("vit-zoo", small),), readers(0.05, width=8), splits=2)
    populations = (("vit-zoo", vit_zoo(300 if scale == "cpu" else 10_000)),)
    return Study("small vision transformers", populations, readers(24 if scale == "cpu" else 3600), 3)


def readers(seconds: float, width: int = 16) -> tuple[Reader | Together, ...]:
    """Return a net that respects the whole symmetry, a net that does not respect it, and baselines."""
    whole = Net("propagation", replace(net_config(ws.Propagation(), seconds, width), batch=16))
    only = Net("propagation, permutations only", replace(whole.config, parts=("permutation",)))
    both = Together("propagation and the canonical trees, mean", (whole, STATISTICS[0]))
    return (whole, *STATISTICS[:1], both, only, *STATISTICS[1:], Mean())
