"""Starting processes: the fast local start and the supervisor."""
