"""The methods of `regauge.gauge`, with one file for each method."""
