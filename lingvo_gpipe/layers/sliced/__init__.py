"""Layers larger than a device, as several consecutive layers with a part of the weights each.

`Layer.Params.consecutive` returns the slices; nothing after the list of layers knows of them.
"""
