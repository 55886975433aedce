"""The uses of PyTorch beyond its public interface, and the settings that torchoffload makes there. Private."""
