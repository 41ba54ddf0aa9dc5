"""A disk with no room, without one: no file of this process may grow."""

import contextlib
import resource

ROOM = 1000


@contextlib.contextmanager
def full_disk():
    """Writing a file beyond ROOM bytes fails in this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
