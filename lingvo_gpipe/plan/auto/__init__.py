"""`--schedule=auto`: schedule, cells per device and recompute policies with the shortest step.

Every candidate is planned by the same simulator as any other model. Those that do not fit the
memory of a device are out; of those whose steps are equally short, the one that needs least is
taken, by measured times the one with the fewest cells and programs. The number M of micro-batches
is chosen, too, where it is not set and changes results by no more than rounding. With
`model.jit_compile=auto`, it is measured which cells XLA should compile.
"""

from lingvo_gpipe.plan.auto.choice import Choice, choose, resolved, smallest

__all__ = ["Choice", "choose", "resolved", "smallest"]
