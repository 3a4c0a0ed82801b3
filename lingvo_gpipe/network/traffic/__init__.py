"""What devices send each other in a step, in bytes, and what hosts have to carry of it.

Nothing here knows how fast a link is: that is `plan.hosts`.
"""
