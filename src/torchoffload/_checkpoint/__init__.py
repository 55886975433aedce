"""Offloading of what selective activation checkpoints save. Private."""
