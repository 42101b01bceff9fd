"""Reading the records of runs, comparing them, and running programs on several device counts."""
