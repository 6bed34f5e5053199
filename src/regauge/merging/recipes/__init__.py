"""Recipes: YAML files in mergekit's format, and the merges that they describe."""
