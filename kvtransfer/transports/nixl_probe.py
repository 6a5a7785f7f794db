"""Whether NIXL opens here: `python -m kvtransfer.transports.nixl_probe` prints one JSON object, `{"error": why}` when not.

For `splitpoint doctor`. In a process of its own: NIXL brings a UCX of its own, which reads its environment when it is loaded.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def probe() -> dict[str, Any]:
    """Makes an agent over a page of memory. `verbs`, `cuda`: what the UCX of the wheel is built with."""
    try:
        from kvtransfer.transports import nixl_library as library
    except ModuleNotFoundError as exc:
        return {"error": f"not installed ({exc.name})", "missing": True}
    except ImportError as exc:
        return {"error": f"does not load: {exc}"}
    page = np.zeros(4096, np.uint8)
    failures: tuple[type[Exception], ...] = (*library.ERRORS, RuntimeError, OSError)
    try:
        config = library.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = library.api.nixl_agent("probe", config)
        registered = agent.register_memory([(page.ctypes.data, len(page), 0, "")], "DRAM")
        agent.deregister_memory(registered)
    except failures as exc:
        return {"error": f"does not open: {exc}"}
    return {
        "version": ".".join(str(part) for part in library.NIXL_VERSION),
        "verbs": library.verbs_bundled(),
        "cuda": library.cuda_bundled(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
