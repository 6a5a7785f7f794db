"""The decode phase's worker service, which also holds the colocated path."""
