"""What a training step will need, before it runs: memory, time, links, and the text of the plan.

Nothing here trains; `profiling` runs layers and cells to measure them.

- What is in the model? `describe`
- What does a step need? `step_plan`; its bytes over time `activations`, its seconds `slot_times`,
  as text `report`
- Which schedule is the fastest that fits? `auto`
- How large may the model be? `largest`
- What do links between hosts carry? `hosts`
- What does this machine need for it? `profiling`, by `measuring`
"""
