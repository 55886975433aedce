"""The cases of ``python -m torchoffload.selftest``, and their comparison with stock. Private."""
