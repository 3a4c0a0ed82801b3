"""Running a network: placement on devices, cell programs, and the executor that calls them.

Only this package knows both cells and devices. `lingvo_gpipe.network` decides what a cell holds and
which program a slot calls (`Cell.program`), `lingvo_gpipe.schedule` when it runs. How a micro-batch
travels through the cells and back is in `replica_pass`, slot by slot; what a slot calls in
`cell_programs`. `executor` cuts a mini-batch into the passes of the replicas and adds up what they
return; `custom_gradient` runs the same passes under a caller's own tape. Why a step failed is found
by `diagnosis`; what a step shows while it runs is in `monitoring`.
"""
