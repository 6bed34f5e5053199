"""Layers of networks over networks: each a small frozen dataclass of settings whose `build` makes a torch module.

A built layer takes and gives `Features`, and the layout that they are of:

    layer = MessagePassing().build(Plan(layouts, width, reads=frozenset({"units", "network"}), generator=generator))
    features = layer(features, layout)

`Plan.reads` says which of its outputs the next layer or the head reads, so that a last layer makes nothing in vain:
"units", "pairs" and "network", where "units" leaves out sets whose units are not permuted ("positions"), and "pairs"
leaves out the blocks of `layout.unwritten` ("unwritten").

To add one: write a file with the dataclass, a `Layer`, and the module, and name it in `LAYERS`; the battery of laws in
`tests/test_weightspace.py` runs over that table. `Layer.traits` says what a net is built around.
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
