"""What a run shows in TensorBoard besides curves, such as examples and what was predicted."""
