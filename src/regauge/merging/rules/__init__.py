"""Merge rules. Each file is named after one rule, which combines one tensor of all networks at a time."""
