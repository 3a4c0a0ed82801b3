"""Running a network: placement on devices, cell programs, and the executor that calls them.

Only this package knows cells and devices at once. What a cell holds is decided in
`lingvo_gpipe.network`, when it runs in `lingvo_gpipe.schedule`.
"""
