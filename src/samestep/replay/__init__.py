"""Replay: one step of a recorded run, repeated on one device and shown from within."""
