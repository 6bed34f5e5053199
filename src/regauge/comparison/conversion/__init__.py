"""Conversions: formulas for the tensors of one implementation of a model, given the tensors of another."""
