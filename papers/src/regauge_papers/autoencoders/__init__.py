"""Paper 002: canonicalizing autoencoders of digit networks and of CNNs."""

from regauge_papers.autoencoders import cnn_lines, cnns, digits, orbits
from regauge_papers.experiment import Experiment

EXPERIMENTS = {
    "digits": Experiment(
        "autoencoders of networks of digits: what decoded networks render (table 1)", digits.config, digits.measure
    ),
    "interpolation": Experiment(
        "lines between copies of digit networks, decoded and latent, and where orbits lie (figures 3, 6 to 8)",
        orbits.config,
        orbits.measure,
    ),
    "cnns": Experiment(
        "autoencoders of small CNNs: what decoded networks classify (table 2)", cnns.config, cnns.measure
    ),
    "cnn-lines": Experiment(
        "lines between small CNNs: as they are, aligned, decoded and latent (figures 4, 5 and 9)",
        cnn_lines.config,
        cnn_lines.measure,
    ),
}
