"""The report of runs: in the terminal, as one page that needs nothing else, and as a PNG of the losses."""
