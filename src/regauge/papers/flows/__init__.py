"""Paper 000: flows over weights."""

from regauge.papers.experiment import Experiment
from regauge.papers.flows import quality, transfer

EXPERIMENTS = {
    "uci": Experiment("networks of breast cancer drawn from flows (table 7.1)", quality.uci, quality.measure),
    "mnist": Experiment("networks of MNIST drawn from flows (table 7.2)", quality.mnist, quality.measure),
    "guidance": Experiment(
        "a flow of MNIST guided to Fashion-MNIST, and as a start there (table 7.3)", transfer.config, transfer.guidance
    ),
    "widths": Experiment(
        "a flow of networks of 10 units draws networks of 32 (table 7.4)", transfer.config, transfer.widths
    ),
}
