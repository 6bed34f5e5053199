"""Files of parameters: safetensors (sharded too), weights-only torch files, and alignments stored beside them."""
