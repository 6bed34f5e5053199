"""Trained networks over networks: learned matching."""

from regauge.learn.hyper_match import HyperMatching, hyper_match

__all__ = ["HyperMatching", "hyper_match"]
