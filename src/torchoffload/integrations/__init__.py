"""Faces for trainers whose own activation offloading has another signature."""
