"""The schedules that have a name: each a function (K, M, V) → `Table` in a file of its own.

Beside them are what several share: the order of rounds, and where weight gradients are computed.
"""
