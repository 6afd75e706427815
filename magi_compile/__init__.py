"""magi_compile: attention for training on long, irregularly masked sequences."""

__version__ = "0.1.0"
