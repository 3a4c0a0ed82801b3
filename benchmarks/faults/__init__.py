"""Faults of runs on several processes: each must end with the bits of an undisturbed run.

`python -m benchmarks.faults --help` lists what it does; it needs Linux, and root for the cases on
hosts, each of which is a network namespace.

    recipes     the model, whose input notes when a mini-batch is drawn
    notes       these notes
    processes   which process of a run is which, and what a run leaves behind
    hosts       hosts in network namespaces, whose links can be cut
    disturbed   one run with one fault
    soak        one long run with many faults, and the memory of its processes
"""
