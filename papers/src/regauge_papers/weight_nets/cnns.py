"""Generalization of small CNNs, whose accuracy is predicted from their weights.

References:
    Unterthiner et al. (2020), Predicting neural network accuracy from weights; paper 002 reads the same family.
"""

from dataclasses import replace

from regauge import weightspace as ws
from regauge.zoo.presets import cnn_architecture, cnn_zoo, cnn_zoo_sgd
from regauge_papers.experiment import Scale
from regauge_papers.weight_nets.accuracy import Study
from regauge_papers.weight_nets.readers import STATISTICS, Mean, Net, Reader, Together, net_config

PAPER = (
    "published on the CIFAR-10 part of the zoo of Unterthiner et al., whose networks are many more and trained longer: "
    "tau .936 (DNG), .935 (Neural Graphs), .934 (NFN), .914 (boosted trees on statistics)"
)


def config(scale: Scale) -> Study:
    """Return the settings: 600 runs with two optimizers; at scale `paper`, there are as many runs as in one part of the
    public zoo.
    """
    if scale == "smoke":
        architecture = cnn_architecture("relu", 1, 8, 8)
        small = replace(cnn_zoo(48), architecture=architecture, data="digits", steps=20, checkpoints=None)
        return Study("small CNNs", (("cnn-zoo", small),), readers(0.05, width=8), splits=2)
    counts = (400, 200) if scale == "cpu" else (10_000, 5_000)
    populations = (("cnn-zoo", cnn_zoo(counts[0])), ("cnn-zoo-sgd", cnn_zoo_sgd(counts[1])))
    return Study("small CNNs 1-16-16-16-10", populations, readers(8 if scale == "cpu" else 3600), 3, PAPER)


def readers(seconds: float, width: int = 16) -> tuple[Reader | Together, ...]:
    """Return a reader with each kind of layer, all with the same budget of CPU seconds, and baselines."""
    nets = {name: Net(name.replace("_", " "), net_config(kind(), seconds, width)) for name, kind in ws.LAYERS.items()}
    plain = nets["propagation"].config
    return (
        *nets.values(),
        Net("propagation, without moments", replace(plain, reads_moments=False)),
        *STATISTICS[:1],
        Together("propagation and the canonical trees, mean", (nets["propagation"], STATISTICS[0])),
        Net("propagation, permutations only", replace(plain, parts=("permutation",))),
        *STATISTICS[1:],
        Mean(),
    )
