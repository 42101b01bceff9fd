"""Proof: reading what runs recorded, comparing them, and running them again."""
