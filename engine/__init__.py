"""vLLM and the simulated engine behind one small protocol, and what both phases' workers share."""
