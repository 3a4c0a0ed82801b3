"""Layers that a network is trained for and measured by: heads, losses, metrics."""
