"""Conversions: how the tensors of one implementation of a model are made of those of another one."""
