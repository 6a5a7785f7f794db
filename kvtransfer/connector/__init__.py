"""The vLLM connector: gathers prefill's KV into staging in the step that computes it, loads verified staging on decode.

vLLM loads `SplitpointConnector` by name from `kvtransfer.connector.facade` (`MODULE_PATH`, `CLASS_NAME`). Decisions are in
`scheduler` (pure), memory and the transfer node in `worker`, byte addresses in `blocks`, differences between vLLM releases
in `shim`. Importing this package loads neither vLLM nor torch.
"""

MODULE_PATH = "kvtransfer.connector.facade"
CLASS_NAME = "SplitpointConnector"
