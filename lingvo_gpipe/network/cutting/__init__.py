"""Where a network is cut into cells: costs, memory of the devices, and the best partition.

Plain numbers: nothing here knows a schedule or a device's name.
"""
