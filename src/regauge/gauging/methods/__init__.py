"""The methods of `regauge.gauge`, one file each."""
