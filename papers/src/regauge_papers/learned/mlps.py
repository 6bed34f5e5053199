"""MLPs that train in seconds: their populations, and the training of matchers on them, at every scale."""

from dataclasses import replace

from regauge.learn import MatchingConfig
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mlp_architecture, mnist_mlps
from regauge_papers.experiment import Scale
from regauge_papers.learned.study import Lessons, Population

COUNTS, PAIRS = {"smoke": 24, "cpu": 640, "paper": 10_000}, {"smoke": 1, "cpu": 10, "paper": 100}
"""By scale: the number of networks of a population, and the number of pairs that are reserved for the table."""
EXAMPLES = {"smoke": 200, "cpu": 4096, "paper": 8192}
"""By scale: the number of training examples for matchers and for methods with data."""
SECONDS = 60.0
"""The CPU seconds for training a matcher at the scale `cpu`."""
REDUCED = (
    f"reduced at the scale cpu: at most {COUNTS['cpu']} networks of a kind and {SECONDS:.0f} CPU seconds for each "
    "matcher, its validations included; losses on 2,000 examples; the paper has 8,000 networks and 25,000 steps of "
    "32 pairs on a GPU"
)


def population(scale: Scale, folder: str, config: PopulationConfig, *, count: int | None = None) -> Population:
    """Return a population in a folder; by default the scale determines the number of networks."""
    config = replace(config, count=count or COUNTS[scale])
    if scale == "smoke":
        _, *hidden, classes = config.architecture.settings["widths"]
        architecture = mlp_architecture(64, *(width // 8 for width in hidden), classes)
        config = replace(config, architecture=architecture, epochs=1, group=8)
        config = config if ":" in config.data else replace(config, data="digits")
        folder = f"{folder}-smoke"
    return Population(folder, config, PAIRS[scale], judged=2000 if scale == "cpu" else None)


def mnist(scale: Scale) -> Population:
    """Return MLPs 784-128-128-128-10 on MNIST, which several experiments share."""
    return population(scale, "mnist-mlps", mnist_mlps())


def matching(scale: Scale) -> MatchingConfig:
    """Return the settings of a matcher."""
    if scale == "smoke":
        return MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=8, checked=2)
    shared = MatchingConfig(depth=2, probes=128, lr=3e-3)
    if scale == "paper":
        return replace(shared, batch=32, epochs=100)
    return replace(shared, batch=8, checked=6, epochs=100_000, seconds=SECONDS, is_cpu_time=True)


def lessons(scale: Scale, *populations: Population) -> Lessons:
    """Return the networks and the settings for training a matcher."""
    return Lessons(populations, matching(scale), EXAMPLES[scale])
