"""What UCX must be told before it is loaded. What the user set is left alone."""

from __future__ import annotations

UCX_ENVIRONMENT = {
    "UCX_MEMTYPE_CACHE": "n",  # the cache misses frees of CUDA memory by other libraries
    "UCX_RNDV_THRESH": "8192",  # above it a send completes only when the receiver has the bytes
    "UCX_MM_ERROR_HANDLING": "y",  # lets shared memory carry endpoints with error handling
    "UCX_KEEPALIVE_INTERVAL": "1s",  # how soon a killed peer of this host is seen
    "UCX_MAX_RNDV_RAILS": "1",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
