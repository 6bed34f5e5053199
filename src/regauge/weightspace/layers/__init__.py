"""Layers of metanetworks. Each layer has a frozen dataclass of settings, whose method `build` creates a torch module.

The inputs of the module are `Features` and their layout, and the outputs are new `Features`:

    layer = MessagePassing().build(Plan(layouts, width, reads=frozenset({"units", "network"}), generator=generator))
    features = layer(features, layout)

`LayerPlan.reads` lists the outputs of a layer that the next layer or the head reads, because the last layer need not
compute all outputs. The outputs are vectors of permuted units ("units"), of units that are not permuted ("positions"),
of pairs of units ("pairs"), of pairs whose values a head does not change ("unwritten"), and of the network ("network").

To add a layer, write a file with the dataclass, a `Layer`, and the module, and add the dataclass to `LAYERS`. The
invariance tests in `tests/test_weightspace.py` cover all layers in `LAYERS`. `Layer.traits` describes the properties of
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
"""Layer classes by their names on the command line."""
