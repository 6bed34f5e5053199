"""Paper 001: a net that learns to align.

References:
    Navon et al. (2024), Equivariant Deep Weight Space Alignment, which calls the method Deep-Align.
"""

from functools import partial

from regauge_papers.experiment import Experiment
from regauge_papers.learned import ablation, elsewhere, halves, images, reduced, samples, scales, starts, tables

EXPERIMENTS = (
    {
        key: Experiment(
            f"{what}: a net learns to align, beside methods that do not",
            partial(tables.config, name=name, what=what, population=population, paper=paper),
            tables.measure,
        )
        for key, (name, what, population, paper) in tables.STUDIES.items()
    }
    | reduced.EXPERIMENTS
    | images.EXPERIMENTS
    | starts.EXPERIMENTS
    | ablation.EXPERIMENTS
    | samples.EXPERIMENTS
    | elsewhere.EXPERIMENTS
    | halves.EXPERIMENTS
    | scales.EXPERIMENTS
)
