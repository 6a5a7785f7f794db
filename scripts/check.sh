#!/usr/bin/env bash
# Everything that can be said about the code without running it. Goes on after a failure, so that one run shows all.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
failed=()
step() {
  local name=$1 begin=$SECONDS
  shift
  if "$@"; then printf 'check  ok      %3ds  %s\n' $((SECONDS - begin)) "$name"
  else printf 'check  FAILED  %3ds  %s\n' $((SECONDS - begin)) "$name"; failed+=("$name"); fi
}
step "ruff check" ruff check --quiet .
step "ruff format" ruff format --quiet --check .
step "mypy" mypy --no-error-summary protos kvtransfer engine prefill decode coordinator scripts
step "lint-imports" lint-imports --no-logo
step "buf lint" buf lint
step "stub drift" scripts/protos.sh --check
if [ ${#failed[@]} -gt 0 ]; then printf 'check: failed: %s\n' "${failed[*]}" >&2; exit 1; fi
