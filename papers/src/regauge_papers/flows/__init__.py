"""Paper 000: flows over weights."""

from regauge_papers.experiment import Experiment
from regauge_papers.flows import barriers, cnns, folds, gaussians, quality, signals, sizes, studies, transfer

EXPERIMENTS = {
    "uci": Experiment("networks of breast cancer drawn from flows (table 7.1)", studies.uci, quality.measure),
    "folds": Experiment(
        "how strongly flows of breast cancer are guided, chosen on training cases", folds.config, folds.measure
    ),
    "mnist": Experiment("networks of MNIST drawn from flows (table 7.2)", studies.mnist, quality.measure),
    "mnist-long": Experiment("the same by one flow with two CPU hours", studies.mnist_long, quality.measure),
    "guidance": Experiment(
        "a flow of MNIST guided to Fashion-MNIST, and as a start there (table 7.3)", transfer.config, transfer.guidance
    ),
    "widths": Experiment(
        "a flow of networks of 10 units draws networks of 32 (table 7.4)", transfer.config, transfer.widths
    ),
    "gaussians": Experiment(
        "a flow between normal distributions, exact and fitted, by two samplers (figures 6.3 and 7.1)",
        gaussians.config,
        gaussians.measure,
    ),
    "barriers": Experiment(
        "losses between networks of breast cancer, as trained and aligned (figure 7.2)",
        barriers.config,
        barriers.measure,
    ),
    "signals": Experiment(
        "sine networks of digits drawn from flows, by class, and recognized", signals.config, signals.measure
    ),
    "cnns": Experiment("small CNNs of MNIST drawn from a flow", cnns.config, quality.measure),
    "cnns-one-start": Experiment("CNNs that all began alike, drawn from a flow", cnns.from_one_start, quality.measure),
    "sizes": Experiment("flows by the width of their nets (figure 7.7)", sizes.config, sizes.measure),
}
