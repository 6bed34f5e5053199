"""All experiments, by paper."""

from regauge.papers import deep_align, residual, sine_waves
from regauge.papers.experiment import Experiments

EXPERIMENTS: dict[str, Experiments] = {
    "001": deep_align.EXPERIMENTS | sine_waves.EXPERIMENTS,
    "extra": residual.EXPERIMENTS,
}
"""Papers by number; "extra" holds what belongs to none of them."""
