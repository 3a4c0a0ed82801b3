"""Times that are measured on this machine, for plans: of layers, and of whole cells' programs.

`profiling` measures layers one by one, for a cut; `cell_times` the programs of the cells that were
cut, run by `cell_runner` as a step runs them.
"""
