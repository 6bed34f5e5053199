"""Layers of networks over networks: each a small frozen dataclass of settings whose `build` makes a torch module.

A built layer takes `Features` and their layout, and returns new `Features`:

    layer = MessagePassing().build(Plan(layouts, width, reads=frozenset({"units", "network"}), generator=generator))
    features = layer(features, layout)

`Plan.reads` lists the outputs that the next layer or the head reads so that the last layer computes no unused outputs.
The names are "units", "pairs" and "network". "units" excludes sets whose units are not permuted ("positions"), and
"pairs" excludes the blocks of `layout.unwritten` ("unwritten").

To add a layer, write a file with the dataclass, a `Layer`, and the module, and add the dataclass to `LAYERS`. The tests
of invariance in `tests/test_weightspace.py` cover all layers of that table. `Layer.traits` describes the properties of
a layer that determine how the net is built.
"""

from regauge.weightspace.layers.dws import DWS
from regauge.weightspace.layers.message_passing import MessagePassing
from regauge.weightspace.layers.nfn import NFN
from regauge.weightspace.layers.plan import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.layers.relational_attention import RelationalAttention
from regauge.weightspace.layers.scale_gmn import ScaleGMN

LAYERS: dict[str, type[Layer]] = {
    "message_passing": MessagePassing,
    "propagation": Propagation,
    "nfn": NFN,
    "dws": DWS,
    "relational_attention": RelationalAttention,
    "scale_gmn": ScaleGMN,
}
"""Name on the command line to class."""
