"""Offloading inside chosen modules of a model. Private."""
