"""Moving the values that compiled graphs save: the partitioner of ``compile_options()``, and the rewriting."""
