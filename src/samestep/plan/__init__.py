"""Pure arithmetic: shards, the tree, the order, the cursor. No torch, no processes, no files."""
