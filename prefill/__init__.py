"""The prefill phase's worker service."""
