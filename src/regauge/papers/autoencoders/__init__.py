"""Paper 002: canonicalizing autoencoders of networks of digits and of CNNs."""

from regauge.papers.autoencoders import cnns, digits, orbits
from regauge.papers.experiment import Experiment

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
}
