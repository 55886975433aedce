"""The contexts that a training loop enters, their options, and the output head that they leave alone. Private."""
