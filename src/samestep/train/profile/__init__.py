"""The profile of a run: where the time of a step goes, on every rank."""
