"""Run folders and ledgers: their writer and their reader."""
