"""Layout, leases, sessions, staging and transports of KV between two workers, and the vLLM connector."""
