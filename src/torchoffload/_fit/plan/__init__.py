"""Plans for a step: how they are found, which are tried, and what is believed of them."""
