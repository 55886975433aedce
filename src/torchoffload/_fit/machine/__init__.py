"""The machine to plan for: ranks that agree, memory, the link, and the tensors in containers."""
