"""All experiments, by paper."""

from regauge_papers import (
    autoencoders,
    basin_causes,
    bayesian,
    deep_align,
    digit_orbits,
    flows,
    learned,
    one_basin,
    one_classifier,
    residual,
    resnets,
    shapes,
    sine_waves,
    transformers,
    weight_nets,
    wide_mlps,
)
from regauge_papers.experiment import Experiment

EXPERIMENTS: dict[str, dict[str, Experiment]] = {
    "000": flows.EXPERIMENTS,
    "001": deep_align.EXPERIMENTS | sine_waves.EXPERIMENTS | learned.EXPERIMENTS,
    "002": digit_orbits.EXPERIMENTS | autoencoders.EXPERIMENTS,
    "003": shapes.EXPERIMENTS,
    "004": bayesian.EXPERIMENTS,
    "extra": residual.EXPERIMENTS,
    "merging": one_classifier.EXPERIMENTS | resnets.EXPERIMENTS | wide_mlps.EXPERIMENTS,
    "transformers": transformers.EXPERIMENTS | one_basin.EXPERIMENTS | basin_causes.EXPERIMENTS,
    "weightspace": weight_nets.EXPERIMENTS,
}
"""The experiments of each paper, by the number of the paper. The keys "extra", "merging", "transformers" and
"weightspace" contain experiments that belong to no numbered paper."""
