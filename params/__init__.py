"""Registered models: recipes by field and dataset.

The networks and input that they put together are in `lingvo_gpipe.tasks`.
"""
