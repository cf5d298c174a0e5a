"""Errors of the runtime: wrong use of `headrace.rt`, never bad input from a user.

HeadraceError
└── RtError                 base
    ├── EffectError         an argument does not fit the declared effects of its op
    ├── StageClosedError    a staging slot was used after its commit
    ├── RefusedError        an access that the checker could not see was refused
    └── DeadlockError       nothing can run and somebody waits
"""

from headrace.errors import HeadraceError


class RtError(HeadraceError):
    """The runtime was used against its rules."""


class EffectError(RtError):
    """An argument of a launch does not fit the declared effects of its op."""


class StageClosedError(RtError):
    """A staging slot was used outside its `with` block or after its commit."""


class RefusedError(RtError):
    """An access to checked memory that could not be recorded was refused."""


class DeadlockError(RtError):
    """Every host thread waits and the simulated device has nothing left to run."""
