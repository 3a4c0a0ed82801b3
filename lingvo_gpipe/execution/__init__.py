"""Running a network: placement on devices, cell programs, and the executor that calls them.

Only this package knows both cells and devices. `lingvo_gpipe.network` decides what a cell holds,
`lingvo_gpipe.schedule` when it runs.
"""
