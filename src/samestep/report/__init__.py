"""The report of a run: in the terminal, as a picture, and as one page that needs nothing else."""
