"""Where a network is cut into cells: costs, memory of the devices, and the best partition.

`partition` is plain numbers; `capacity` and `cuts` also read the schedule's table. Devices are
numbers.
"""
