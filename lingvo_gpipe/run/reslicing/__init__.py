"""Other slices for a run: its variables joined and divided, optimizer state included.

`layout` compares Params and finds the slices of each variable, `values` makes the new ones, `mode`
reads one run and writes the other.
"""
