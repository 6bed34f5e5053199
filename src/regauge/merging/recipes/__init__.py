"""Recipes: YAML files as mergekit reads them, and what they ask for."""
