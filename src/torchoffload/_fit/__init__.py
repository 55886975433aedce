"""Choosing, for each block of a model, which operators' outputs are kept and which are computed again. Private."""
