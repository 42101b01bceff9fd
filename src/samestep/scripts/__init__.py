"""Existing scripts, unchanged: every rank runs the whole script; wrapped forwards are split over the ranks."""
