"""Paper 003: alignment of implicit representations of 3D shapes.

References:
    Ballerini (2023), Alignment of implicit neural representations of 3D shapes via permutation symmetries.
"""

import functools

from regauge_papers.experiment import Experiment
from regauge_papers.shapes import alignment, embeddings, pruning, reconstructions, straightening
from regauge_papers.shapes.study import study

_measure_variants = functools.partial(alignment.measure, ways=alignment.VARIANTS)
EXPERIMENTS = {
    "alignment": Experiment(
        "figures 3.1 to 3.3 and the whole group, width 128", functools.partial(study, width=128), alignment.measure
    ),
    "variants": Experiment(
        "section 3.3, normalized and pruned weights, width 128",
        functools.partial(study, width=128),
        _measure_variants,
    ),
    "reconstructions": Experiment(
        "figures 3.9 to 3.11, what networks on the path show", reconstructions.config, reconstructions.measure
    ),
    "basin": Experiment("section 3.4, lines made flat by training", straightening.config, straightening.measure),
    "embeddings": Experiment(
        "figure 3.4, distances of embeddings by an encoder trained here", embeddings.config, embeddings.measure
    ),
    "alignment-512": Experiment(
        "the same at the paper's width, hours on a CPU", functools.partial(study, width=512), alignment.measure
    ),
    "variants-512": Experiment(
        "section 3.3 at the paper's width",
        functools.partial(study, width=512),
        _measure_variants,
    ),
    "pruned-512": Experiment(
        "figures 3.6 and 3.12, what pruned networks show, at the paper's width", pruning.config, pruning.measure
    ),
    "basin-512": Experiment(
        "section 3.4 at the paper's width, without hypernetwork",
        functools.partial(straightening.config, width=512),
        straightening.measure,
    ),
}
