"""The wraps and hooks by which a probe records a program in a worker."""
