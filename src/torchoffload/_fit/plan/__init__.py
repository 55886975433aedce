"""Plans for a step: how they are found, which are tried, and beliefs about their times."""
