"""Ranks talking to each other: the environment, transports, the ordered reduction, buckets."""
