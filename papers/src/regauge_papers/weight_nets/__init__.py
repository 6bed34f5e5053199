"""Nets that read networks, compared with plain statistics of layers on our own populations."""

from regauge_papers.experiment import Experiment
from regauge_papers.weight_nets import cnns, images, vision_transformers
from regauge_papers.weight_nets.accuracy import measure

EXPERIMENTS = {
    "mnist": Experiment(
        "the digits that sine networks represent, told from their weights", images.mnist, images.measure
    ),
    "fashion": Experiment(
        "the garments that sine networks represent, told from their weights", images.fashion, images.measure
    ),
    "cnns": Experiment("the accuracy of small CNNs, predicted from their weights", cnns.config, measure),
    "vits": Experiment(
        "the accuracy of small vision transformers, predicted from their weights", vision_transformers.config, measure
    ),
}
