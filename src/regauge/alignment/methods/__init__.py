"""The alignment methods, one file for each."""
