"""Steps that are measured, and the kinds of blocks that they show."""
