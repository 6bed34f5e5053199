"""All experiments, by paper."""

from regauge.papers import deep_align, merging, residual, resnets, sine_waves
from regauge.papers.experiment import Experiments

EXPERIMENTS: dict[str, Experiments] = {
    "001": deep_align.EXPERIMENTS | sine_waves.EXPERIMENTS,
    "extra": residual.EXPERIMENTS,
    "merging": merging.EXPERIMENTS | resnets.EXPERIMENTS,
}
"""Papers by number; "extra" and "merging" hold what belongs to none of them."""
