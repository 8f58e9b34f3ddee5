"""Which exceptions end one request, and which end the run.

Work on one request's own data, such as its prompt or its sampling parameters, fails for reasons
that lie in that request. Whatever it raises becomes the request's error, unless the device has
failed: after that no other request can be answered either. Work on all rows together is not
isolated: what it raises ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from std_core.types import RequestError

logger = logging.getLogger(__name__)

DEVICE_ERRORS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, DistError)
# how messages of RuntimeErrors begin by which PyTorch reports a failed device or full host memory
DEVICE_MESSAGES = ("CUDA ", "CUDA:", "cuDNN ", "NCCL ", "[enforce fail at alloc_cpu.cpp")


@contextmanager
def isolated(work: str) -> Iterator[None]:
    """Turn exceptions of work on one request's own data into that request's error.

    Args:
        work: what fails, as the message's subject.

    Raises:
        RequestError: the one that was raised, or `invalid_request` in place of any other exception.
        Exception: the device has failed; see `is_device_error`.
    """
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        if is_device_error(error):
            raise
        # with the traceback: the cause may be a fault of this code
        logger.warning("%s failed; this request ends with an error", work, exc_info=True)
        message = f"{work} failed: {type(error).__name__}: {error}"
        raise RequestError("invalid_request", message) from error


def is_device_error(error: Exception) -> bool:
    """Whether an exception says that a device, its memory or another rank has failed."""
    if isinstance(error, DEVICE_ERRORS):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(DEVICE_MESSAGES)
