#!/usr/bin/env bash
# Regenerates the committed stubs. `--check` regenerates into a scratch folder and fails on drift.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=.
if [ "${1:-}" = "--check" ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"$python" -m grpc_tools.protoc -I . --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/splitpoint/v1/*.proto
if [ "$out" != . ]; then
  for f in $(cd "$out" && find protos -type f); do
    cmp -s "$out/$f" "$f" || { echo "stub drift: $f (run make protos)"; exit 1; }
  done
  echo "stubs match"
fi
