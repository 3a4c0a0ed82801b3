"""Several processes and hosts: who takes part, who watches whom, and what happens at a loss.

One chief traces the step and drives it; workers serve their devices to it. Beside each of these
processes runs a supervisor: a parent process without TensorFlow, which starts it, watches it and
starts it again. The supervisors of a run talk over one TCP connection per worker, the lease.

    chief's supervisor ──── lease ──── worker's supervisor    plain Python
           │ starts                          │ starts
         chief ──── TensorFlow's gRPC ──── worker             `connection`, `worker_server`

Only these two import TensorFlow, and the package `remote`, by which a worker's process reads the
mini-batches and traces operations. Cells, schedules and checkpoints do not occur here.
"""
