"""The memory and time of a training step, without a device: a dry run of forward and backward."""
