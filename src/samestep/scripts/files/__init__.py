"""Files: what an adopted script writes, reads, asks and starts happens once, and is the same on all ranks."""
