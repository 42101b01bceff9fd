"""Pure arithmetic: microbatches, the tree, the order, the cursor. No torch, no processes, no files."""
