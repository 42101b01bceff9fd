"""Datasets, and the loader that turns ids into microbatches on a device."""
