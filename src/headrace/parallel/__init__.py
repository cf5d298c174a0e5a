"""Several processes on one machine that run one model: rank 0 leads, the others follow.

The scheduler is rank 0's alone. Each step goes to the other ranks as one message, the frozen
`SchedulerOutput`, over a pipe of each; they do with it what rank 0 does, in lockstep. No tokens are
sent: what ranks exchange inside a step makes them all choose the same ones (`models.shard`). A pipe
is also how death is noticed: its other end is closed by whatever ends a process.
"""
