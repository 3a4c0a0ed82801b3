"""Imports that wait until a name is used: a package's own modules, and TensorFlow."""
