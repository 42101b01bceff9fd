"""Existing scripts, unchanged: every rank runs the whole script, and the wrapped module's forward is shared out."""
