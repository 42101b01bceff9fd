"""Datasets, and the loader that turns ids into shards on a device."""
