"""What a training step takes in memory and time, without a device: a dry run of forward and backward."""
