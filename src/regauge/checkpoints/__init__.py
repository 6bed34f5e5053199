"""Networks in files: safetensors files (also sharded), weights-only torch files, adapters, and stored alignments."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__, __file__, moved={"save_alignment": "regauge.checkpoints:Alignment.save"}
)
