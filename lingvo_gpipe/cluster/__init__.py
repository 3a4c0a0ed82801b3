"""Several processes and hosts: who takes part, who watches whom, and what happens at a loss.

One chief traces the step and drives it; workers serve their devices to it. Each of these processes
has a supervisor: a parent process without TensorFlow, which starts it, watches it and starts it
again. The supervisors of a run talk over one TCP connection per worker, the lease. With
`--workers=local:N`, the chief's supervisor is the parent of the workers, too.

    chief's supervisor ──── lease ──── worker's supervisor    plain Python
           │ starts                          │ starts
         chief ──── TensorFlow's gRPC ──── worker             `chief`, `run.worker`

A loss is seen by a supervisor whose process ended or stopped (`child`), by a lease without an
answer (`lease`), by a worker that cannot reach another one (`peers`), or by the chief, where an
operation of TensorFlow fails (`chief`) or does not return (`execution.monitoring`). Then
`chief_supervisor` starts all processes again, and the run goes on from its newest whole checkpoint
(`run.run_state`). Cells, schedules and checkpoints do not occur here.
"""
