#!/usr/bin/env bash
# Standard clients against a running system: `scripts/check_clients.sh [--http HOST:PORT --grpc HOST:PORT] [--tokenizer DIR]`,
# and `scripts/check_clients.sh crosscheck [--real] [--json FILE]`: their figures beside ours. Without addresses a system is started
# and ended. Makes the clients' environments, .cache/clients and .cache/aiperf, first: their pins go together neither with ours
# nor with each other. Needs .venv (make setup).
set -euo pipefail
cd "$(dirname "$0")/.."
clients=$PWD/.cache/clients aiperf=$PWD/.cache/aiperf
SECONDS=0
say() { printf 'clients %3ds  %s\n' "$SECONDS" "$*"; }
[ -x .venv/bin/uv ] || { echo "check_clients: .venv is missing: make setup" >&2; exit 1; }

export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_NO_PROGRESS=1
index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi

# make_environment FOLDER STAMP LOCK FURTHER: the lock's packages alone, then what the function FURTHER adds to FOLDER.
make_environment() {
  if [ "$(cat "$1/.stamp" 2>/dev/null)" = "$2" ]; then
    say "${1##*/}: up to date"
    return
  fi
  rm -rf "$1"
  say "${1##*/}: installing $(grep -c '==' "$3") packages of $3"
  .venv/bin/python -m venv "$1"
  VIRTUAL_ENV=$1 .venv/bin/uv pip install --quiet --no-deps --require-hashes -r "$3"
  "$4" "$1"
  printf '%s\n' "$2" > "$1/.stamp"
}

# guidellm loads its data through torch. Its CPU build, from where scripts/setup.sh finds it.
add_torch() {
  local torch pip log
  torch=$(cat requirements/torch-cpu.txt)
  pip=("$1/bin/python" -m pip --disable-pip-version-check --quiet)
  if ! log=$("${pip[@]}" install --no-deps "$torch" 2>&1); then
    "${pip[@]}" install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu || {
      printf '%s\n' "$log" >&2
      exit 1
    }
  fi
}

# The transport of ours. Built in a copy: a build leaves its folders beside the source.
add_plugin() {
  local copy
  copy=$(mktemp -d)
  cp -r deploy/aiperf "$copy/plugin"
  VIRTUAL_ENV=$1 .venv/bin/uv pip install --quiet --no-deps --no-build-isolation "$copy/plugin"
  rm -rf "$copy"
}

stamp_of() { cat "$@" | sha256sum | cut -c1-64; }
make_environment "$clients" "$(stamp_of requirements/clients.lock requirements/torch-cpu.txt)" requirements/clients.lock add_torch
module=check_clients
if [ "${1:-}" = crosscheck ]; then
  module=crosscheck
  shift
  set -- --python "$clients/bin/python" "$@"
else
  make_environment "$aiperf" "$(stamp_of requirements/aiperf.lock deploy/aiperf/pyproject.toml deploy/aiperf/*/*)" \
    requirements/aiperf.lock add_plugin
  set -- --python "$clients/bin/python" --aiperf "$aiperf/bin/aiperf" "$@"
fi
say "ready"
exec .venv/bin/python -m "scripts.$module" "$@"
