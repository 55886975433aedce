"""What torchoffload asks of PyTorch beyond its public interface, and what it tells it. Private."""
