"""Conversions: how to compute the tensors of one implementation of a model from those of another."""
