"""Running a network: placement on devices, cell programs, and the executor that calls them.

Only this package knows both cells and devices. `lingvo_gpipe.network` decides what a cell holds and
which program a slot calls (`Cell.program`), `lingvo_gpipe.schedule` when it runs. How a micro-batch
travels through the cells and back is in `executor` and `cell_programs`; under a caller's own tape,
in `custom_gradient`. Why a step failed is found by `diagnosis`; what a step shows while it runs is
in `monitoring`.
"""
