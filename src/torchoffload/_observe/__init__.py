"""Statistics, profiles, reports, plots, and the memory of the host. Private."""
