"""Replay: one step of a recorded run, taken again on one device and shown from within."""
