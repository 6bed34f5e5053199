"""Networks that read and write the weights of networks."""

from regauge.weightspace.chains import ChainConfig, ChainDWS, ChainScaleConfig, ChainScaleGMN
from regauge.weightspace.decoder import Decoder, MLPDecoder
from regauge.weightspace.decoders import DECODERS
from regauge.weightspace.encoder import Fourier, Logarithms, Scalars
from regauge.weightspace.files import load_net, save_net
from regauge.weightspace.heads import HEADS, Equivariant, Invariant, UnitFeatures
from regauge.weightspace.hypernetwork import HyperNetwork
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.layers.dws import DWS
from regauge.weightspace.layers.message_passing import MessagePassing
from regauge.weightspace.layers.nfn import NFN
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.layers.relational_attention import RelationalAttention
from regauge.weightspace.layers.scale_gmn import ScaleGMN
from regauge.weightspace.layout import Layout, compile_layout
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes import Probes
from regauge.weightspace.row_encoder import RowEncoder, weight_rows
from regauge.weightspace.shares import find_readers
from regauge.weightspace.template_decoder import TemplateDecoder

__all__ = [
    "DECODERS",
    "DWS",
    "HEADS",
    "LAYERS",
    "NFN",
    "ChainConfig",
    "ChainDWS",
    "ChainScaleConfig",
    "ChainScaleGMN",
    "Decoder",
    "Equivariant",
    "Fourier",
    "HyperNetwork",
    "Invariant",
    "Layout",
    "Logarithms",
    "MLPDecoder",
    "MessagePassing",
    "Metanet",
    "Probes",
    "Propagation",
    "RelationalAttention",
    "RowEncoder",
    "Scalars",
    "ScaleGMN",
    "TemplateDecoder",
    "UnitFeatures",
    "compile_layout",
    "find_readers",
    "load_net",
    "save_net",
    "weight_rows",
]
