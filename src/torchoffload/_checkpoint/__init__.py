"""Offloading of the outputs that selective activation checkpoints save. Private."""
