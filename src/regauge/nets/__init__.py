"""The small model families that the examples, tests and papers use."""
