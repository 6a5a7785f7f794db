"""A fault of ours at the edge of a front end: logged whole, shown by its id. Both front ends share it."""

from __future__ import annotations

import logging

from protos.errors import Code, SplitpointError

logger = logging.getLogger(__name__)


def internal_error(exc: BaseException, what: str) -> SplitpointError:
    """A fault of ours as the client may see it: an id, and no inner detail. The log line has the rest."""
    error = SplitpointError(Code.INTERNAL, "internal error")
    error.message = f"internal error {error.error_id}"
    logger.error("%s failed, error_id=%s", what, error.error_id, exc_info=exc)
    return error
