"""A hybrid engine small enough to read in one sitting, on the real runtime.

Integer state, drafts and accepted counts, row compaction, steps in flight, several streams,
checkpoints, prefix hits, abort, preemption. It exists to try the checker: every fault of the
catalogue is a detour in it.
"""
