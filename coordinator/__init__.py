"""Everything that decides, and every front door."""
