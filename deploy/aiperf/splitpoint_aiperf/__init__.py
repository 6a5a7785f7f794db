"""Splitpoint's gRPC API as a transport of aiperf. `plugins.yaml` registers it."""
