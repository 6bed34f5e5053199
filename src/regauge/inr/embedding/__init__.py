"""Embeddings of INRs: an encoder of weights, and a decoder that asks its code for the signal."""
