"""Posteriors of other libraries, read from their objects; none of the libraries is imported."""
