"""programs: random autograd programs, as data: drawn, run stock and offloaded, compared, shrunk and printed."""
